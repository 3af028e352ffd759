from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import Code, ConfigError
from gristmill.gateway.continuation.local import LocalRenderer
from gristmill.gateway.continuation.render_worker import LocalTemplate
from gristmill.gateway.continuation.renderer import RenderFailed, Rendering
from tests.gateway.continuation.tiny_tokenizer import CHAT, save_tokenizer

# Every test starts a process that imports transformers.
pytestmark = pytest.mark.slow

Json = dict[str, Any]

USER: Json = {"role": "user", "content": "mend the mill"}
_LOOP = "{% for n in range(99999) %}"
ENDLESS = f"{{% if messages | length > 1 %}}{_LOOP}{_LOOP}{{% endfor %}}{{% endfor %}}{{% endif %}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rendering(*messages: Json, **settings: Any) -> Rendering:
    return Rendering("m", messages, None, settings)


def run(folder: Path, work: Callable[[LocalRenderer], Awaitable[None]], timeout_s: float = 30.0) -> None:
    async def bounded() -> None:
        renderer = LocalRenderer(folder, timeout_s)
        try:
            async with asyncio.timeout(60):
                await renderer.open()
                await work(renderer)
        finally:
            await renderer.close()

    asyncio.run(bounded())


def test_renders_as_the_template_does(folder: Path) -> None:
    """Another process, the same ids; with the variables that the engine would give the template."""
    template = LocalTemplate(folder)

    async def work(renderer: LocalRenderer) -> None:
        plain = await renderer.render(rendering(USER))
        assert plain == template.ids([USER], None, {"add_generation_prompt": True})
        quiet = await renderer.render(rendering(USER, chat_template_kwargs={"enable_thinking": False}))
        assert list(quiet) == template.ids([USER], None, {"add_generation_prompt": True, "enable_thinking": False})

    run(folder, work)


def test_many_at_once(folder: Path) -> None:
    """Each gets its own answer, and one that is refused or given up disturbs no other."""

    async def work(renderer: LocalRenderer) -> None:
        texts = [f"mill {number}" for number in range(40)]
        asked = [asyncio.create_task(renderer.render(rendering({"role": "user", "content": text}))) for text in texts]
        refused = asyncio.create_task(renderer.render(rendering({"role": "user", "content": 3})))
        given_up = asyncio.create_task(renderer.render(rendering(USER)))
        await asyncio.sleep(0)
        given_up.cancel()
        found = await asyncio.gather(*asked)
        alone = [await renderer.render(rendering({"role": "user", "content": text})) for text in texts]
        assert found == alone
        with pytest.raises(RenderFailed, match="expected text or parts"):
            await refused

    run(folder, work)


def test_what_cannot_be_sent(folder: Path) -> None:
    """Half a character pair is legal JSON, and no text."""

    async def work(renderer: LocalRenderer) -> None:
        with pytest.raises(RenderFailed, match="cannot be written"):
            await renderer.render(rendering({"role": "user", "content": "\ud83e"}))
        assert await renderer.render(rendering(USER))

    run(folder, work)


def test_a_call_that_cannot_wait_for_the_start(folder: Path) -> None:
    """The process goes on loading, for the calls behind."""

    async def work(renderer: LocalRenderer) -> None:
        process = renderer._process  # pyright: ignore[reportPrivateUsage]
        assert process is not None
        process.kill()
        await process.wait()
        first = asyncio.create_task(renderer.render(rendering(USER)))
        await asyncio.sleep(0)
        starting = renderer._starting  # pyright: ignore[reportPrivateUsage]
        first.cancel()
        assert await renderer.render(rendering(USER))
        assert renderer._starting is starting  # pyright: ignore[reportPrivateUsage]

    run(folder, work)


def test_the_loop_goes_on(folder: Path) -> None:
    """Calls in flight must not wait for a rendering."""

    async def work(renderer: LocalRenderer) -> None:
        long = [{"role": "user", "content": "the wheel of the mill " * 400} for _ in range(400)]
        task = asyncio.create_task(renderer.render(rendering(*long)))
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(await task) > 100_000
        assert turns > 50

    run(folder, work)


def test_a_template_without_end(tmp_path: Path) -> None:
    """It is ended, what waited for it fails, and the next conversation is rendered."""
    folder = save_tokenizer(tmp_path, f"{ENDLESS}{CHAT}")

    async def work(renderer: LocalRenderer) -> None:
        stuck = asyncio.create_task(renderer.render(rendering(USER, USER)))
        await asyncio.sleep(0)
        behind = asyncio.create_task(renderer.render(rendering(USER)))
        with pytest.raises(RenderFailed, match="longer than 2 s"):
            await stuck
        with pytest.raises(RenderFailed):
            await behind
        assert await renderer.render(rendering(USER))

    run(folder, work, timeout_s=2.0)


def test_nobody_waits_for_a_template_without_end(tmp_path: Path) -> None:
    """A call that gave up must not leave the process to it, with all later calls behind."""
    folder = save_tokenizer(tmp_path, f"{ENDLESS}{CHAT}")

    async def work(renderer: LocalRenderer) -> None:
        stuck = asyncio.create_task(renderer.render(rendering(USER, USER)))
        await asyncio.sleep(0)
        stuck.cancel()
        with pytest.raises(RenderFailed, match="longer than 2 s"):
            await renderer.render(rendering(USER))
        assert await renderer.render(rendering(USER))

    run(folder, work, timeout_s=2.0)


def test_a_process_that_dies(folder: Path) -> None:
    """It costs the rendering in flight, and is started again."""

    async def work(renderer: LocalRenderer) -> None:
        process = renderer._process  # pyright: ignore[reportPrivateUsage]
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        waiting = asyncio.create_task(renderer.render(rendering(USER)))
        await asyncio.sleep(0)
        process.kill()
        with pytest.raises(RenderFailed, match="has ended"):
            await waiting
        assert await renderer.render(rendering(USER))

    run(folder, work)


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said when the gateway starts, with what to do about it."""

    async def work(_: LocalRenderer) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="no chat template") as told:
        run(save_tokenizer(tmp_path / "plain", None), work)
    assert (told.value.code, told.value.where) == (Code.OPTION_INVALID, "--tokenizer")
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError(name='transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError) as told:
        run(tmp_path / "plain", work)
    assert told.value.hint == "pip install 'gristmill[render]', in a clone pip install -e '.[render]'"


def test_the_working_directory_holds_no_modules(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent may have left anything there."""
    (tmp_path / "transformers.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))

    async def work(renderer: LocalRenderer) -> None:
        assert await renderer.render(rendering(USER))

    run(folder, work)
