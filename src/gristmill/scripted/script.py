"""A script: which reply a request gets, what is sampled for it, and how the engine then behaves.

Invariant: a script is read as a whole or refused with a path; an unknown key, name or placeholder is never passed over.

Not here: reading files (reading), finding the reply (choice), what its texts become (composing).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

__all__ = [
    "Behaviour",
    "Ended",
    "Fault",
    "Garbage",
    "HttpStatus",
    "Match",
    "Redirect",
    "Renders",
    "Reply",
    "Reset",
    "Rule",
    "Script",
    "Settings",
    "Silence",
    "Span",
    "TextTest",
    "ToolCall",
    "Truncated",
    "Versions",
    "When",
    "Wrong",
]

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_ErrorStatus = Annotated[int, msgspec.Meta(ge=300, le=599)]

Span = int | tuple[int, int]
"""One number, or the first and the last of several."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An object of a script: what it does not know is refused."""


class Match(_Strict, frozen=True):
    """A text test by regular expression, searched for anywhere; its groups are `{{match.N}}`."""

    matches: str


TextTest = str | list[str] | Match
"""A text that must be contained, several of which one must be, or a regular expression."""


class When(_Strict, frozen=True):
    """What must hold of a request; docs/reference/engine-script.md says what each one looks at."""

    turn: Span | None = None
    step: Span | None = None
    attempt: Span | None = msgspec.field(default=None, name="try")
    user: TextTest | None = None
    tool: TextTest | None = None
    last: TextTest | None = None
    system: TextTest | None = None
    first_user: TextTest | None = None
    prompt: TextTest | None = None
    any: TextTest | None = None
    model: TextTest | None = None
    offers: str | list[str] | None = None
    tools: bool | None = None
    structured: bool | None = None
    tool_choice: Literal["auto", "none", "required", "named"] | None = None
    header: dict[str, TextTest] | None = None
    route: Literal["chat", "completions"] | None = None
    stream: bool | None = None
    without: When | None = msgspec.field(default=None, name="not")


class HttpStatus(_Strict, frozen=True, tag_field="kind", tag="status"):
    """Answer with an error instead."""

    status: _ErrorStatus
    body: Any = None
    retry_after_s: _Seconds | None = None
    headers: dict[str, str] = {}


class Reset(_Strict, frozen=True, tag_field="kind", tag="reset"):
    """Reset the connection, before the head of the answer or after so many chunks."""

    after_chunks: _Count | None = None


class Silence(_Strict, frozen=True, tag_field="kind", tag="silence"):
    """Say nothing more and keep the connection open."""

    after_chunks: _Count | None = None


class Ended(_Strict, frozen=True, tag_field="kind", tag="eof"):
    """End the answer in good order before its content has ended."""

    after_chunks: _Count = 1


class Truncated(_Strict, frozen=True, tag_field="kind", tag="truncate"):
    """Close the connection in the middle of a body, or of an event."""

    after_chunks: _Count = 1


class Garbage(_Strict, frozen=True, tag_field="kind", tag="garbage"):
    """Send bytes that are no event, or no JSON."""

    after_chunks: _Count = 0


class Redirect(_Strict, frozen=True, tag_field="kind", tag="redirect"):
    """Send the client elsewhere."""

    location: str
    status: Literal[301, 302, 303, 307, 308] = 307


Fault = HttpStatus | Reset | Silence | Ended | Truncated | Garbage | Redirect


class Wrong(_Strict, frozen=True):
    """What an otherwise good reply says wrongly."""

    token_ids: Literal["missing", "short", "long"] | None = None
    logprobs: Literal["missing", "short", "nan"] | None = None
    prompt_ids: Literal["missing", "differ"] | None = None
    usage: int = 0
    response_id: str | None = None
    finish: bool = True
    done: bool = True


class Versions(_Strict, frozen=True):
    """The weight version changes while this reply is sampled."""

    to: str
    after: _Count


class Behaviour(_Strict, frozen=True):
    """How the engine serves a reply; None leaves it to the script's `behaviour`."""

    chunks: Literal["one", "uneven"] | _Positive | None = None
    delay_s: _Seconds | None = None
    gap_s: _Seconds | None = None
    fault: Fault | None = None
    wrong: Wrong | None = None
    weights: Versions | None = None
    gzip: bool | None = None
    split: _Share | None = None


class ToolCall(_Strict, frozen=True):
    """One call of a tool: its name, or the first of several names that is offered, and arguments.

    `arguments` as text is sampled as it stands; an object is fitted to the tool's schema.
    """

    name: str | list[str]
    arguments: str | dict[str, Any] = {}


class Reply(Behaviour, frozen=True):
    """What the model says, as its parts or as the raw sampled text, and how it is served."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = []
    json: dict[str, Any] | None = None
    raw: str | None = None
    eos: bool = True
    finish: str | None = None
    cut: _Positive | None = None


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Replies for the requests that meet a condition.

    Attributes:
        name: what counters call it.
        when: the condition; an empty one holds always.
        turns: one list of replies for each turn, where `by_turn`; else one list for all turns. Of a list, the n-th is
            for the n-th time that the same request is asked, the last for all later ones.
        by_turn: the number of assistant messages in the request chooses the list; beyond the last one there is none.
    """

    name: str
    when: When
    turns: tuple[tuple[Reply, ...], ...]
    by_turn: bool


Renders = Literal["right", "differ", "waver", "fail", "hang"]
"""How messages are rendered without sampling: as they are sampled from, otherwise, every other time otherwise, with an
error, or not in time."""


class Settings(_Strict, frozen=True):
    """Everything in a script but its rules."""

    profile: Literal["vllm", "sglang", "plain"] = "vllm"
    models: list[str] = msgspec.field(default_factory=lambda: ["scripted"])
    max_model_len: _Positive = 32768
    version: str = "0.32.0"
    thinking: bool = False
    weights: str = "w0"
    seed: int = 0
    split: _Share = 0.0
    scale_out: bool = True
    renders: Renders = "right"
    logprobs_mode: Literal["raw", "processed"] = "raw"
    session_header: str | None = None
    tool_names: dict[str, list[str]] = {}
    behaviour: Behaviour = Behaviour()


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and rules of which the first that matches answers."""

    settings: Settings
    rules: tuple[Rule, ...]
    counts_tries: bool = False
