"""The gateway's log: one JSON object a line on standard error.

Invariant: a line never holds message content, a key, a header value or a file's content; what a request brings along
(paths, ids) is only there after it was found to be a known route or a well-formed id.
"""

from __future__ import annotations

import logging
import sys
from time import time
from typing import Any, Final

import orjson

__all__ = ["Log"]

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "at": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        said.update(getattr(record, "said", {}))
        if record.exc_info and record.exc_info[0] is not None:
            # The kind and the place of a bug; its text could quote what a request held.
            said["error"] = record.exc_info[0].__name__
            said["trace"] = _places(record.exc_info[2])
        return orjson.dumps(said, default=str).decode()


def _places(trace: Any) -> list[str]:
    places: list[str] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        places.append(f"{code.co_filename.rpartition('gristmill/')[2]}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return places[-12:]


class Log:
    """Writes events with fields.

    Args:
        level: `debug`, `info`, `warning`, `error`.
    """

    def __init__(self, level: str = "info") -> None:
        self._logger: Final = logging.Logger("gristmill.gateway", _LEVELS[level])
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Line())
        self._logger.addHandler(handler)
        self.started_at: Final = time()

    def debug(self, event: str, **said: Any) -> None:
        """Write a line at level debug."""
        self._logger.debug(event, extra={"said": said})

    def info(self, event: str, **said: Any) -> None:
        """Write a line at level info."""
        self._logger.info(event, extra={"said": said})

    def warning(self, event: str, **said: Any) -> None:
        """Write a line at level warning."""
        self._logger.warning(event, extra={"said": said})

    def error(self, event: str, *, bug: BaseException | None = None, **said: Any) -> None:
        """Write a line at level error; of a bug its kind and places."""
        self._logger.error(event, exc_info=bug, extra={"said": said})
