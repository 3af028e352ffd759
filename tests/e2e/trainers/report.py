"""Reads a line of JSON of each check, and says which real classes were checked: `report.py EXPECTED <LINES`.

Invariant: it fails unless there are as many lines as expected, and each names classes and counts comparisons.
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    expected = int(sys.argv[1])
    checked = [json.loads(line) for line in sys.stdin]
    for line in checked:
        if not (line["classes"] and line["checks"] > 0):
            sys.stderr.write(f"report: {line['trainer']} compared nothing\n")
            return 1
        sys.stdout.write(f"{line['trainer']} {line['version']}: {line['checks']:,} comparisons\n")
        sys.stdout.writelines(f"  {name}\n" for name in line["classes"])
    sys.stdout.write(f"{len(checked)} of {expected} trainers checked\n")
    return 0 if len(checked) == expected else 1


if __name__ == "__main__":
    sys.exit(main())
