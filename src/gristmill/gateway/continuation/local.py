"""Renders with a tokenizer and its chat template from a folder, for engines that have no route for it.

The work is done by a process of its own (render_worker): importing `transformers`, loading a tokenizer and running a
template take the interpreter for longer than calls in flight can wait.

Invariant: a rendering that takes too long, or a process that ends, is a rendering that failed, and costs nobody else
more than that; the process is started again when it is next needed.

Not here: caching (the planner's), and what the engine's own template makes of a conversation: the folder has to be the
one that the engine was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from gristmill.errors import Code, ConfigError
from gristmill.extras import install_hint
from gristmill.gateway.continuation.render_worker import LENGTH_bytes, RenderAnswer, RenderQuestion, framed
from gristmill.gateway.continuation.renderer import RenderFailed, Rendering
from gristmill.gateway.continuation.template_input import template_variables

__all__ = ["LocalRenderer"]

_START_s: Final = 120.0
_WORKER: Final = "gristmill.gateway.continuation.render_worker"
_decode = msgspec.json.Decoder(RenderAnswer).decode


class LocalRenderer:
    """Renders with a tokenizer of this machine.

    Args:
        folder: `tokenizer.json`, `tokenizer_config.json`, and the chat template in it or beside it.
        timeout_s: of one rendering, waiting for others left out; behind it the process is ended.
    """

    def __init__(self, folder: Path, timeout_s: float = 30.0) -> None:
        self.name: Final = "tokenizer"
        self._folder: Final = folder
        self._timeout_s: Final = timeout_s
        self._starting: asyncio.Task[Process] | None = None
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Sequence[int]]] = {}
        self._unanswered: deque[int] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._number = 0

    async def open(self) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: `option_invalid`: the folder has none, or no chat template, or `transformers` is not installed.
        """
        try:
            await self._running()
        except RenderFailed as failed:
            absent = "ModuleNotFoundError" in failed.message
            raise ConfigError(
                f"expected a folder with a tokenizer and its chat template: {failed.message}",
                code=Code.OPTION_INVALID,
                where="--tokenizer",
                hint=install_hint("render") if absent else "name the folder that the engine was given",
            ) from failed

    async def close(self) -> None:
        """End the process."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        reader, self._reader = self._reader, None
        self._end("the renderer was closed")
        if reader is not None:
            await asyncio.wait([reader])

    async def render(self, asked: Rendering) -> Sequence[int]:
        """Return the token ids of a conversation.

        Raises:
            RenderFailed: the template refuses it, or it took too long.
        """
        process = await self._running()
        self._number += 1
        number = self._number
        question = RenderQuestion(
            number=number,
            messages=list(asked.messages),
            tools=None if asked.tools is None else list(asked.tools),
            settings=template_variables(asked.settings),
        )
        try:
            sent = framed(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise RenderFailed(f"the conversation cannot be written: {error}") from error
        stdin = process.stdin
        assert stdin is not None
        answer: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            stdin.write(sent)
            self._unanswered.append(number)
            if len(self._unanswered) == 1:
                self._look_after_the_next()
            await stdin.drain()
            return await answer
        except ConnectionError as error:
            raise RenderFailed("the process that renders has ended") from error
        finally:
            self._waiting.pop(number, None)

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        if self._starting is None or self._starting.done():
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_retrieved)
        # Loading a tokenizer may take longer than the call that needed it first can wait.
        return await asyncio.shield(self._starting)

    async def _start(self) -> Process:
        # A session of its own: an interrupt at the terminal is the gateway's to handle.
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            # Without the working directory on its path, where an agent may have left modules.
            *("-P", "-m", _WORKER, str(self._folder)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(_START_s):
                first = await _read(process)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise RenderFailed(f"the tokenizer was not loaded within {_START_s:g} s") from error
            raise
        if first is None or first.error is not None:
            await process.wait()
            raise RenderFailed("the process ended before it was ready" if first is None else str(first.error))
        self._process = process
        self._reader = asyncio.create_task(self._read_answers(process))
        return process

    def _look_after_the_next(self) -> None:
        """Give the process so long for what it renders now, whether or not anybody still waits for that."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._unanswered:
            self._watch = asyncio.get_running_loop().call_later(self._timeout_s, self._give_up)

    def _give_up(self) -> None:
        self._end(f"the template took longer than {self._timeout_s:g} s")

    async def _read_answers(self, process: Process) -> None:
        while (answer := await _read(process)) is not None:
            if self._process is process:
                self._unanswered.popleft()
                self._look_after_the_next()
            waiting = self._waiting.get(answer.number)
            if waiting is None or waiting.done():
                continue
            if answer.ids is None:
                waiting.set_exception(RenderFailed(answer.error or "there is no rendering"))
            else:
                waiting.set_result(answer.ids)
        await process.wait()
        if self._process is process:
            self._end("the process that renders has ended")

    def _end(self, why: str) -> None:
        """End the process, and everything that waits for it."""
        process, self._process = self._process, None
        self._unanswered.clear()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RenderFailed(why))


def _retrieved(starting: asyncio.Task[Process]) -> None:
    """Take note of a failure that nobody waits for any more; whoever asks next starts anew."""
    if not starting.cancelled():
        starting.exception()


async def _read(process: Process) -> RenderAnswer | None:
    """Read an answer; None where the process has ended."""
    stdout = process.stdout
    assert stdout is not None
    try:
        length = await stdout.readexactly(LENGTH_bytes)
        return _decode(await stdout.readexactly(int.from_bytes(length, "little")))
    except asyncio.IncompleteReadError:
        return None
