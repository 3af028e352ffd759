"""A vLLM server on the CPU with the tiny model, in a process of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from tests.e2e.stage import clean_environment, process, until_healthy

__all__ = ["MODEL", "Engine", "engine"]

MODEL = "tiny-qwen3"
_FLAGS = (
    *("--max-model-len", "32768", "--max-num-seqs", "16", "--max-num-batched-tokens", "4096"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--enable-scale-out", "--enforce-eager"),
)


@dataclass(frozen=True)
class Engine:
    """A server that answers."""

    url: str
    running: Popen[bytes]


@contextmanager
def engine(python: str, model: str, cache: Path, folder: Path) -> Iterator[Engine]:
    """Run the server until the block ends; its log is `engine.log`."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", MODEL]
    argv += ["--host", "127.0.0.1", "--port", str(port), *_FLAGS]
    env = clean_environment() | {
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        # Threads that are bound to processors and wait for each other stand still while another program has one.
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "VLLM_CACHE_ROOT": str(cache / "vllm-cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("PYTHONPATH", None)
    log = folder / "engine.log"
    with process(argv, log, env) as running:
        url = f"http://127.0.0.1:{port}"
        until_healthy("vLLM", url, running, log, 400)
        yield Engine(url, running)
