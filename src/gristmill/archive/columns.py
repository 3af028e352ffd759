"""The tables of a data set and their columns, declared once.

A part of a partition is three tables with the same number: `attempts`, `calls` and `bodies`. `calls` has a row for
each call of an attempt (`kind`: `call`, `late` or `lost`), tokens as the delta to the call's base; `bodies` has the
pieces of text that the requests and replies of an attempt have in common. Rows of an attempt stand together.

Everything that is read back is in the columns marked as evidence; the others repeat it for queries and are compared
with it by `verify`.

Not here: Arrow's schemas (parquet_tables), and how an attempt becomes rows (attempt_rows).
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ATTEMPTS", "BODIES", "CALLS", "TABLES", "Column", "Table", "file_name"]


class Column(NamedTuple):
    """One column.

    Attributes:
        name: as in SQL.
        kind: `string`, `int`, `float`, `bool`, `binary`, `ids` (list of int32), `floats` (list of float32) or `names`
            (list of strings).
        null: whether a row may have none.
        about: what it holds.
        evidence: whether it is read back; the others are computed from evidence.
    """

    name: str
    kind: str
    about: str
    null: bool = False
    evidence: bool = False


class Table(NamedTuple):
    """One table."""

    name: str
    columns: tuple[Column, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its columns."""
        return tuple(column.name for column in self.columns)


_KEY: Final = (
    Column("rollout_id", "string", "the rollout", evidence=True),
    Column("attempt", "int", "number of the attempt, from 0", evidence=True),
)

ATTEMPTS: Final = Table(
    "attempts",
    (
        *_KEY,
        Column("state", "string", "`finished`, `frozen` or `abandoned`", evidence=True),
        Column("snapshot_id", "string", "digest of the whole attempt as it is here", evidence=True),
        Column("group_id", "string", "its group", null=True),
        Column("reward", "float", "of the rollout; null is a missing one", null=True),
        Column("has_result", "bool", "whether a result is stored"),
        Column("calls", "int", "calls that a policy can select"),
        Column("lost", "int", "calls without an outcome, late ones included"),
        Column("usable_calls", "int", "calls whose tokens may be trained"),
        Column("sampled_tokens", "int", "of `calls`"),
        Column("prompt_tokens", "int", "of `calls`, each prompt counted whole"),
        Column("models", "names", "as served, in the order of their first calls"),
        Column("first_at", "float", "earliest admission, unix seconds", null=True),
        Column("last_at", "float", "latest completion, unix seconds", null=True),
        Column("touched_at", "float", "when the ledger last wrote to it", null=True, evidence=True),
        Column("first_call", "int", "number of its first row in `calls`, over the part", evidence=True),
        Column("call_rows", "int", "how many rows it has there", evidence=True),
        Column("first_body", "int", "number of its first row in `bodies`, over the part", evidence=True),
        Column("body_rows", "int", "how many rows it has there", evidence=True),
        Column("result", "binary", "the result without history and metadata, msgpack", null=True, evidence=True),
        Column("result_value", "binary", "the returned history, exact JSON", null=True, evidence=True),
        Column("result_metadata", "binary", "JSON", null=True, evidence=True),
        Column("setup", "binary", "what it was opened with, without the JSON, msgpack", null=True, evidence=True),
        Column("setup_metadata", "binary", "JSON", null=True, evidence=True),
        Column("setup_overrides", "binary", "JSON", null=True, evidence=True),
    ),
)

CALLS: Final = Table(
    "calls",
    (
        *_KEY,
        Column("kind", "string", "`call`, `late` (its outcome came after the result) or `lost`", evidence=True),
        Column("model_call_id", "string", "the call"),
        Column("parent_call_id", "string", "the call that it continues", null=True),
        Column("response_id", "string", "as served to the client", null=True),
        Column("ordinal", "int", "commit number", null=True),
        Column("dialect", "string", "of the request", null=True),
        Column("model", "string", "as served", null=True),
        Column("response_status", "string", "of the reply", null=True),
        Column("finish_reason", "string", "of the reply", null=True),
        Column("delivery", "string", "whether the client got the reply", null=True),
        Column("purpose", "string", "label, advice only", null=True),
        Column("usable", "bool", "whether its tokens may be trained"),
        Column("unusable_reason", "string", "why not", null=True),
        Column("admitted_at", "float", "unix seconds", null=True),
        Column("completed_at", "float", "unix seconds", null=True),
        Column("prompt_len", "int", "tokens of the whole prompt"),
        Column("prev_len", "int", "of those, the ones that it shares with its base"),
        Column("cum_len", "int", "tokens of prompt and generation"),
        Column("sampled_tokens", "int", "tokens of the generation"),
        Column("base_call_id", "string", "whose whole sequence the prompt begins with", null=True),
        Column("token_ids", "ids", "tokens after `prev_len`: rest of the prompt, generation", null=True, evidence=True),
        Column("logprobs", "floats", "of the generation, nats", null=True, evidence=True),
        Column("extras", "binary", "further arrays (routed experts), msgpack", null=True, evidence=True),
        Column("record", "binary", "the whole record, msgpack", evidence=True),
        Column("request", "binary", "JSON, references stand for bodies", null=True, evidence=True),
        Column("reply", "binary", "likewise", null=True, evidence=True),
        Column("headers", "binary", "likewise", null=True, evidence=True),
        Column("status", "int", "of HTTP", null=True, evidence=True),
    ),
)

BODIES: Final = Table(
    "bodies",
    (
        *_KEY,
        Column("number", "int", "what a reference to it says", evidence=True),
        Column("text", "binary", "JSON text, references (`\\x01NUMBER\\x01`) stand for smaller numbers", evidence=True),
    ),
)

TABLES: Final = (ATTEMPTS, CALLS, BODIES)


def file_name(table: Table, part: int) -> str:
    """Name the file of a table of a part."""
    return f"{table.name}-{part:05d}.parquet"
