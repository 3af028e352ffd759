"""`gristmill.rollout()`: one rollout of an agent that is this Python program.

    with gristmill.rollout(ledger="run.gristmill", upstream="http://127.0.0.1:8000") as rollout:
        client = rollout.openai()
        ...
        rollout.finish({"messages": messages}, reward=1.0)

Invariant: a rollout that was opened is finished, at the latest when its block ends; an exception in the block is kept
in the result's metadata with no reward, and goes on.

Not here: gateways (place), harnesses that are commands (run).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from gristmill.canonical import JsonValue
from gristmill.errors import Code, ConfigError, GristmillError
from gristmill.gateway.config import GatewayConfig
from gristmill.gateway.settings import load_settings
from gristmill.records import CallCredit, Failure
from gristmill.service.asked import check_result
from gristmill.service.harnesses import HARNESSES, Reach
from gristmill.service.outcome import Outcome
from gristmill.service.place import Begun, begin

__all__ = ["Rollout", "rollout"]

_LOG_LEVEL: Final = "GRISTMILL_LOG_LEVEL"


class Rollout:
    """A rollout, open while its `with` or `async with` block runs; made by `rollout`.

    Attributes:
        rollout_id, attempt: which one it is.
        key: the API key of its model calls.
        base_url, openai_base_url, anthropic_base_url: of the gateway; OpenAI's ends with `/v1`.
        env: variables for SDKs and child processes.
    """

    def __init__(self, opening: contextlib.AbstractContextManager[Begun]) -> None:
        self._opening: Final = opening
        self._stack: Final = contextlib.ExitStack()
        self._begun: Begun | None = None
        self._outcome: Outcome | None = None

    def _known(self) -> Begun:
        if self._begun is None:
            raise ConfigError(
                "expected a rollout that is open, got one outside its block",
                code=Code.ATTEMPT_CLOSED,
                where="gristmill.rollout",
                hint="with gristmill.rollout(…) as rollout: …",
            )
        return self._begun

    @property
    def rollout_id(self) -> str:
        """Which rollout it is."""
        return self._known().opened.rollout_id

    @property
    def attempt(self) -> int:
        """Which attempt of it."""
        return self._known().opened.attempt

    @property
    def key(self) -> str:
        """The API key of its model calls; it opens this rollout and nothing else."""
        return self._known().opened.key

    @property
    def base_url(self) -> str:
        """Where the gateway is."""
        return self._known().opened.base_url

    @property
    def openai_base_url(self) -> str:
        """Base address for OpenAI's SDKs."""
        return self._known().opened.openai_base_url

    @property
    def anthropic_base_url(self) -> str:
        """Base address for Anthropic's SDKs."""
        return self._known().opened.anthropic_base_url

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that SDKs read, for child processes."""
        reach = Reach(openai_base_url=self.openai_base_url, anthropic_base_url=self.anthropic_base_url, key=self.key)
        return HARNESSES["openai"].prepare(reach, Path()).variables

    def openai(self, **options: Any) -> Any:
        """Return an `openai.OpenAI` client of this rollout.

        Args:
            options: more arguments of the client.

        Raises:
            ConfigError: `option_invalid`: the package is not installed.
        """
        return self._client("OpenAI", options)

    def openai_async(self, **options: Any) -> Any:
        """Return an `openai.AsyncOpenAI` client of this rollout; otherwise as `openai`."""
        return self._client("AsyncOpenAI", options)

    def _client(self, kind: str, options: Mapping[str, Any]) -> Any:
        try:
            import openai  # pyright: ignore[reportMissingImports]  # noqa: PLC0415  somebody else's package
        except ImportError as error:
            raise ConfigError(
                "expected the package openai, it is not installed",
                code=Code.OPTION_INVALID,
                where="rollout.openai",
                hint="any other client will do: rollout.openai_base_url and rollout.key",
            ) from error
        make: Any = getattr(openai, kind)
        return make(base_url=self.openai_base_url, api_key=self.key, **options)

    def finish(
        self,
        result: JsonValue = None,
        reward: float | None = None,
        *,
        advantage: float | None = None,
        credits: Sequence[CallCredit] = (),
        failure: Failure | None = None,
        metadata: Mapping[str, Any] | None = None,
        policy: str | None = None,
    ) -> Outcome:
        """Store what the rollout came to; it takes no calls from then on.

        Args:
            result: the returned history: `{"messages": […]}`, `{"response": …}` or `{"responses": […]}`.
            reward: a finite number; None is a missing one.
            advantage: of the rollout, where the caller knows it; None is a missing one.
            credits: rewards and advantages of calls, or of spans of their tokens; a reply names its call in the header
                `x-gristmill-call-id`.
            failure: that the rollout failed, and whether it is masked or scored.
            metadata: JSON kept beside it.
            policy: a built-in policy that the outcome is counted by.

        Returns:
            What the calls come to under the policy: selected with so many rows, or rejected with a code.

        Raises:
            ConfigError: `option_invalid`: the result is neither an object nor None.
            CaptureError: `attempt_differs`: it was finished with another result; or the gateway is gone.
        """
        place, opened = self._known()
        check_result(result, "result")
        answer = place.client.finish(
            opened.attempt_key,
            result,
            reward,
            advantage=advantage,
            credits=credits,
            failure=failure,
            metadata=metadata,
            policy=policy,
        )
        self._outcome = msgspec.convert({name: answer[name] for name in Outcome.__struct_fields__}, Outcome)
        return self._outcome

    async def finish_async(
        self,
        result: JsonValue = None,
        reward: float | None = None,
        *,
        advantage: float | None = None,
        credits: Sequence[CallCredit] = (),
        failure: Failure | None = None,
        metadata: Mapping[str, Any] | None = None,
        policy: str | None = None,
    ) -> Outcome:
        """Do as `finish` off the event loop."""
        return await asyncio.to_thread(
            lambda: self.finish(
                result,
                reward,
                advantage=advantage,
                credits=credits,
                failure=failure,
                metadata=metadata,
                policy=policy,
            )
        )

    def __enter__(self) -> Self:
        self._begun = self._stack.enter_context(self._opening)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is not None and self._outcome is None:
                # The block's own exception is the one to tell.
                with contextlib.suppress(GristmillError):
                    self.finish(metadata={"error": type(error).__name__})
            elif self._outcome is None:
                self.finish()
            place, opened = self._known()
            with contextlib.suppress(GristmillError):
                # The rollout is finished, so its key makes no more calls either way.
                place.client.revoke(opened.attempt_key, drain_s=0.0)

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)


def rollout(  # noqa: PLR0913  each of them is a choice of its own
    *,
    gateway: str | None = None,
    admin_key_file: str | Path | None = None,
    ledger: str | Path | None = None,
    upstream: str | Sequence[str] | None = None,
    rollout_id: str | None = None,
    attempt: int | None = None,
    group_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Rollout:
    """Open a rollout for the length of a `with` or `async with` block.

    Args:
        gateway: address of a gateway that runs; without one a gateway is started over `ledger` for the block, or the
            one that has the ledger open is joined.
        admin_key_file: of that gateway; beside `ledger` by default.
        ledger: file that the calls go to.
        upstream: address of an engine, or several.
        rollout_id: letters, digits, `._-`; a random one by default.
        attempt: its number; the next one by default.
        group_id: rollouts of one prompt that are compared with each other.
        metadata: JSON kept in the result.
        overrides: sampling settings over those that are asked for.
        settings: more settings of a gateway that is started, by name.

    Raises:
        ConfigError: `option_invalid`, a setting; the others when the block is entered.
    """
    upstreams = [upstream] if isinstance(upstream, str) else upstream
    given: dict[str, Any] = {"ledger": ledger, "admin_key_file": admin_key_file, "upstreams": upstreams}
    if _LOG_LEVEL not in os.environ:
        # The log of a gateway beside one's own program is for when something is wrong.
        given["log_level"] = "warning"
    flags = {name: value for name, value in given.items() if value is not None} | dict(settings or {})

    def read(**more: Any) -> GatewayConfig:
        return load_settings({**flags, **more})

    asked = {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "group_id": group_id,
        "metadata": metadata,
        "overrides": overrides,
    }
    return Rollout(begin(read, asked, gateway=gateway))
