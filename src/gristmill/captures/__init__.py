"""Recorded captures: engine replies, JSON lines and files on disk, to records and token deltas.

Invariant: decoding is pure and total: any bytes give a `Reply` with a reason, or a `DecodeError` with a
place. Only `files` opens anything. See README.md in this folder for the data model, caveats and non-goals.
"""

from gristmill.captures.call import CallContext, MadeCall, calls_from_reply, choice_call_id
from gristmill.captures.decode import decode_reply, dialect_of
from gristmill.captures.files import read_capture, read_result_file
from gristmill.captures.lines import CapturedRollout, CaptureFile, Note, read_lines, read_result
from gristmill.captures.reply import Reply, ReplyChoice, Usage
from gristmill.captures.writer import write_lines

__all__ = [
    "CallContext",
    "CaptureFile",
    "CapturedRollout",
    "MadeCall",
    "Note",
    "Reply",
    "ReplyChoice",
    "Usage",
    "calls_from_reply",
    "choice_call_id",
    "decode_reply",
    "dialect_of",
    "read_capture",
    "read_lines",
    "read_result",
    "read_result_file",
    "write_lines",
]
