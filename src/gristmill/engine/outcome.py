"""What becomes of one archived attempt: the same function for every engine and for the check of its work.

Invariant: whatever is wrong with one attempt is the refusal of that attempt, also where it cannot be read and where a
policy of one's own breaks its contract: it takes no other with it.

Not here: selection and rows (pipeline), files (partition).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple

from gristmill.archive.parquet_part import PartReader
from gristmill.credit import Advantages
from gristmill.engine.job import BuildOptions
from gristmill.errors import Code, DecodeError, LedgerError, PolicyError
from gristmill.export.formats import FORMATS, Needs
from gristmill.export.writer import Outcome
from gristmill.pipeline import run_rollout, select_rollout
from gristmill.records import Capture, Result
from gristmill.selection import Rejected
from gristmill.selection.verdict import refused_verdicts

__all__ = ["Decided", "decided", "refused_for"]


class Decided(NamedTuple):
    """An attempt and what became of it; what cannot be read is an empty capture."""

    capture: Capture
    result: Result
    outcome: Outcome


def decided(options: BuildOptions, part: PartReader, advantages: Advantages | None) -> Iterator[Decided]:
    """Read the attempts of a part and decide each.

    Args:
        options: how rows are made.
        part: that is open.
        advantages: that rows carry; None: none.

    Raises:
        DecodeError: `file_unreadable`, `file_malformed`: the table of attempts cannot be read.
        PolicyError, ConfigError: the policy cannot be loaded.
    """
    policy = options.load()
    target = FORMATS[options.format]
    for row in part.rows():
        try:
            read = part.attempt(row, exchanges=target.exchanges)
        except DecodeError as error:
            if error.code is Code.FILE_UNREADABLE:
                raise
            capture = Capture(rollout_id=row["rollout_id"], attempt=row["attempt"])
            yield Decided(capture, Result(), refused_for(options, capture, error))
            continue
        capture, result = read.capture, read.result or Result()
        outcome: Outcome
        with contextlib.redirect_stdout(sys.stderr):
            try:
                if target.needs is Needs.ROWS:
                    outcome = run_rollout(
                        capture,
                        result,
                        policy,
                        mode=options.mode,
                        train_model=options.train_model,
                        advantage=advantages,
                    )
                else:
                    outcome = select_rollout(capture, result, policy, train_model=options.train_model)
            except (PolicyError, DecodeError, LedgerError) as error:
                outcome = refused_for(options, capture, error)
        yield Decided(capture, result, outcome)


def refused_for(options: BuildOptions, capture: Capture, error: PolicyError | DecodeError | LedgerError) -> Rejected:
    """Make an error that one attempt caused the refusal of that attempt."""
    return Rejected(
        rollout_id=capture.rollout_id,
        attempt=capture.attempt,
        policy=options.policy,
        options=options.options,
        code=error.code,
        where=error.where or "$",
        message=error.message,
        verdicts=refused_verdicts(capture, error.code),
    )
