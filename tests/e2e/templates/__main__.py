"""Continuation on every template that packages carry: `python -m tests.e2e.templates [NAME…]`, started by templates.sh.

Each template is given random conversations. Where a prompt is derived from the parent's tokens, it must be exactly what
the text of the whole rendering says (truth); where the truth has no such prompt, it must be refused. The same is done
through vLLM's render-only server, whose renderings must be those of the local tokenizer, id by id.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np

from gristmill.gateway.continuation.proof import ParentEnd, Proof, prove
from gristmill.gateway.continuation.render_worker import LocalTemplate
from gristmill.gateway.continuation.renderer import Renderer, RenderFailed, Rendering
from gristmill.gateway.continuation.template_input import template_variables
from tests.e2e import loopback
from tests.e2e.checks import Checks
from tests.e2e.templates.render_server import RenderServer, render_server
from tests.e2e.templates.sources import Source, folder_of, sources
from tests.e2e.templates.stories import Story, story
from tests.e2e.templates.truth import Expected, expected

STORIES, STORIES_OF_ENGINE = 200, 60
STARTS: Final = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|turn>", "<|user|>", "<｜User｜>")


class InProcess:
    """Renders here, with the template of a folder; counts and times what it renders."""

    name = "tokenizer"

    def __init__(self, template: LocalTemplate) -> None:
        self._template = template
        self.renderings = 0
        self.seconds = 0.0

    async def render(self, asked: Rendering) -> Sequence[int]:
        began = perf_counter()
        try:
            return self._template.ids(asked.messages, asked.tools, template_variables(asked.settings))
        except Exception as error:
            raise RenderFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self.renderings += 1
            self.seconds += perf_counter() - began


@dataclass
class Tally:
    """What became of a template's conversations."""

    conversations: int = 0
    continued: int = 0
    closed: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    lost: int = 0


def settings_of(told: Story) -> dict[str, Any]:
    """Return what a Chat body says of a story's settings."""
    variables = dict(told.settings)
    settings: dict[str, Any] = {}
    if "reasoning_effort" in variables:
        settings["reasoning_effort"] = variables.pop("reasoning_effort")
    return settings | ({"chat_template_kwargs": variables} if variables else {})


async def one(renderer: Renderer, template: LocalTemplate, source: Source, seed: int, tally: Tally) -> None:
    """Continue one conversation, and judge what comes of it."""
    told = story(seed, source.ends, STARTS, tools=source.tools)
    chance = random.Random(seed)
    settings = settings_of(told)
    tally.conversations += 1
    true: Expected | str
    try:
        text = template.text(told.messages, told.tools, template_variables(settings))
    except Exception as error:  # noqa: BLE001 - the boundary: a template raises what it likes
        text, true = "", f"the template refuses: {error}"
    else:
        true = expected(text, told, source.ends, lambda part: tokenise(template, part))
    sampled = [chance.randrange(1000, 2000) for _ in range(chance.randrange(1, 30))]
    how = chance.random()
    end = true.end if isinstance(true, Expected) else 7
    # Most replies end by themselves; some are cut, some end with a token that ends no turn of this template.
    ended = how < 0.85
    sequence = [5, *sampled, *([end] if how < 0.7 else [999_999] if ended else [])]

    async def render(messages: Sequence[dict[str, Any]], asks: bool) -> np.ndarray[Any, Any]:
        asked = settings if asks else {**settings, "add_generation_prompt": False}
        return np.array(await renderer.render(Rendering("m", messages, told.tools, asked)), np.int32)

    try:
        found = await prove(render, told.messages, told.answered, ParentEnd(sequence[-1], ended))
    except RenderFailed:
        tally.refused["render_failed"] += 1
        return
    if not isinstance(found, Proof):
        tally.refused[str(found)] += 1
        tally.lost += isinstance(true, Expected) and how < 0.7
        return
    closed = sequence[-1] != found.end_id
    prompt = [*sequence, *([found.end_id] if closed else []), *found.suffix_T.tolist()]
    tally.continued += 1
    tally.closed += closed
    fault = wrong(prompt, sequence, closed, true, text, template)
    if fault:
        tally.wrong.append(f"story {seed} ({told.shape}): {fault}")


def wrong(
    prompt: Sequence[int],
    sequence: Sequence[int],
    closed: bool,
    true: Expected | str,
    text: str,
    template: LocalTemplate,
) -> str:
    """Say what is wrong with a derived prompt; nothing where it is right."""
    if isinstance(true, str):
        return f"continued, though {true}"
    added = list(prompt[len(sequence) :])
    whole = list(tokenise(template, text))
    right = [[true.end, *true.ids]] if closed else [list(true.ids)]
    if closed:
        # A template may write more than one token at the end of a turn; all of them close one that was cut.
        at = len(whole) - len(added)
        right += [whole[at:]] if added[-len(true.ids) - 1 :] == [true.end, *true.ids] else []
    if added not in right:
        return f"got {decode(template, added)!r}, expected {decode(template, true.ids)!r}"
    if whole[len(whole) - len(added) :] != added:
        return "it is not what the whole rendering ends with"
    if not closed and text.isascii() and decode(template, true.ids) != true.text:
        return f"as text it is {decode(template, true.ids)!r}, expected {true.text!r}"
    return ""


def tokenise(template: LocalTemplate, text: str) -> Sequence[int]:
    """Return the ids of a text with its control tokens."""
    return template.tokenizer(text, add_special_tokens=False)["input_ids"]


def decode(template: LocalTemplate, ids: Sequence[int]) -> str:
    """Return ids as text, control tokens written out."""
    return template.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


async def alike(server: RenderServer, template: LocalTemplate, source: Source) -> tuple[int, list[str]]:
    """Compare the renderings of engine and local tokenizer; return how many were equal, and what differs."""
    equal, different = 0, list[str]()
    local = InProcess(template)
    for seed in range(STORIES_OF_ENGINE):
        told = story(seed, source.ends, STARTS, tools=source.tools)
        asked = Rendering("m", told.messages, told.tools, settings_of(told))
        ids = [await rendered(renderer, asked) for renderer in (server, local)]
        if ids[0] == ids[1]:
            equal += 1
        else:
            different.append(f"story {seed}: {ids[0]}\n{ids[1]}")
    return equal, different


async def rendered(renderer: Renderer, asked: Rendering) -> list[int] | None:
    """Return a rendering, None where it is refused."""
    try:
        return list(await renderer.render(asked))
    except RenderFailed:
        return None


async def tried(renderer: Renderer, template: LocalTemplate, source: Source, stories: int) -> Tally:
    """Continue many conversations."""
    tally = Tally()
    for seed in range(stories):
        await one(renderer, template, source, seed, tally)
    return tally


def main(wanted: list[str]) -> int:
    """Try the templates named, or all."""
    loopback.enter()
    cache, python = Path(os.environ["E2E_CACHE"]), os.environ["E2E_VLLM_PYTHON"]
    folder = Path(tempfile.mkdtemp(prefix="e2e-templates-"))
    checks = Checks()
    lines: list[Sequence[str]] = []
    for source in sources():
        if wanted and source.name not in wanted:
            continue
        with checks.subject(source.name):
            lines.append(_try(checks, source, cache, folder, python))
    _print(lines)
    return checks.close(folder)


def _try(checks: Checks, source: Source, cache: Path, folder: Path, python: str) -> Sequence[str]:
    made = folder_of(source, cache / "templates", folder)
    template = LocalTemplate(made)
    local = InProcess(template)
    tally = asyncio.run(tried(local, template, source, STORIES))
    checks.equal("no prompt is wrong", [], tally.wrong[:3])
    by_engine = "-"
    if python and not source.borrowed:
        with render_server(python, made, cache, folder / "engine.log") as server:
            equal, different = asyncio.run(alike(server, template, source))
            checks.equal("the engine renders as the local tokenizer does", [], different[:2])
            of_engine = asyncio.run(tried(server, template, source, STORIES_OF_ENGINE))
        checks.equal("no prompt by the engine's renderings is wrong", [], of_engine.wrong[:3])
        by_engine = f"{equal}/{STORIES_OF_ENGINE}, {of_engine.continued}"
    refused = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.refused.items()))
    per_ms = 1e3 * local.seconds / max(1, local.renderings)
    return (
        source.name,
        f"{source.tokenizer}{' (borrowed)' if source.borrowed else ''}",
        *(str(count) for count in (tally.conversations, tally.continued, tally.closed)),
        refused,
        str(tally.lost),
        str(len(tally.wrong)),
        f"{per_ms:.2f}",
        by_engine,
    )


def _print(lines: Sequence[Sequence[str]]) -> None:
    headings = (
        *("template", "tokenizer", "conversations", "continued", "closed", "refused by reason"),
        *("refused though provable", "wrong", "ms a rendering", "engine: equal, continued"),
    )
    table = [headings, *lines]
    widths = [max(len(line[at]) for line in table) for at in range(len(headings))]
    sys.stdout.write("\n")
    for line in table:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
