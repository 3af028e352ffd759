"""The engines behind a gateway, which of them takes an attempt, and which of them are there.

Invariant: all calls of an attempt go to one engine, so that its prefix cache serves them: the engine with the highest
SHA-256 of attempt and address. An engine that is down moves only its own attempts, each to its next engine, and they
return when it is back: the choice depends on nothing but who is up, so that every gateway makes the same one.

An engine takes no call before it has said what it is. Its `epoch` rises when it restarted: its process started at
another time, its version changed, or it could not be reached and does not say when it started. Where several engines
share one address that says little; `gristmill doctor` finds out.

Not here: connections (client), what an engine returns (probe).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final, Protocol, Self

from gristmill.errors import CaptureError, Code, ConfigError
from gristmill.gateway.upstream.adapters import engine_for
from gristmill.gateway.upstream.client import Client, Reply
from gristmill.gateway.upstream.identity import Identity, Started, identify, is_up, is_working, started
from gristmill.gateway.upstream.probe import capabilities_of, measure
from gristmill.gateway.upstream.protocol import (
    Ask,
    Capabilities,
    Engine,
    EngineKind,
    Support,
    UpstreamError,
    UpstreamFault,
)
from gristmill.gateway.upstream.spec import UpstreamSettings, UpstreamSpec

__all__ = ["Attempt", "Replica", "Replicas"]

_RETRY_s: Final = 1.0
_BREATH_s: Final = 0.1
_IDENTITY_EVERY: Final = 12
"""Good checks after which an engine is asked again when it started."""
_MEASURE_EVERY: Final = 12
"""Good checks after which a measurement that told nothing, of a paused engine for example, is made again."""


class Attempt(Protocol):
    """What names an attempt."""

    @property
    def rollout_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...


class Replica:
    """One engine.

    Args:
        spec: as configured.
        client: asks it.
        settings: limits.
    """

    def __init__(self, spec: UpstreamSpec, client: Client, settings: UpstreamSettings) -> None:
        self.spec: Final = spec
        self.label: Final = spec.label
        self.epoch = 0
        self._client = client
        self._settings = settings
        self._up = False
        self._identity: Identity | None = None
        self._found = Capabilities(kind=spec.kind or EngineKind.GENERIC)
        self._engine = engine_for(self._found)
        self._started: Started | None = None
        self._suspect = asyncio.Event()
        self._unreached = False
        self._good = self._bad = 0
        self._measuring: asyncio.Task[None] | None = None
        self._differed_at: int | None = None

    @property
    def continues(self) -> bool:
        """Whether it may be given prompts as tokens: until it was seen to sample from others, and after a restart."""
        return self._differed_at != self.epoch

    def stop_continuing(self) -> None:
        """Note that it sampled from another prompt than it was given."""
        self._differed_at = self.epoch

    @property
    def engine(self) -> Engine:
        """Its adapter, by what is known of it so far."""
        return self._engine

    @property
    def capabilities(self) -> Capabilities:
        """What is known of it so far."""
        return self._found

    @property
    def max_model_len(self) -> int | None:
        """How many tokens prompt and reply have together, None where the engine does not say."""
        return self._found.max_model_len

    @property
    def up(self) -> bool:
        """Whether it takes calls."""
        return self._up

    @property
    def measuring(self) -> bool:
        """Whether it is just being measured."""
        return self._measuring is not None and not self._measuring.done()

    async def measured(self, limit_s: float) -> None:
        """Wait for a measurement that runs, so that it is known what to ask for; not longer than a limit."""
        if self._measuring is not None and not self._measuring.done():
            await asyncio.wait({self._measuring}, timeout=limit_s)

    def serves(self, model: str) -> bool:
        """Say whether it is configured for a model, or lists it."""
        return model in (self.spec.models or self._found.models)

    async def open(self, ask: Ask) -> Reply:
        """Send a request.

        Raises:
            UpstreamError: as `Client.open`; the engine is then looked at out of turn.
        """
        try:
            return await self._client.open(self.spec, ask, self.healthy)
        except UpstreamError as error:
            if error.fault is not UpstreamFault.PROTOCOL:
                self._unreached = self._unreached or error.fault is UpstreamFault.UNREACHABLE
                self._suspect.set()
            raise

    async def healthy(self) -> bool:
        """Say whether the engine lives, whatever it is doing."""
        return await is_working(self._client, self.spec, self._found.kind, self._settings.health_timeout_s)

    async def watch(self, first: asyncio.Event) -> None:
        """Look at the engine until cancelled; `first` is set after the first look."""
        try:
            while True:
                well = await self._look()
                first.set()
                pause_s = self._settings.check_interval_s
                await self._pause(pause_s if well else min(_RETRY_s, pause_s))
        finally:
            if self._measuring is not None:
                self._measuring.cancel()

    async def _pause(self, pause_s: float) -> None:
        # Calls that fail by the hundred still mean one look at a time.
        await asyncio.sleep(min(_BREATH_s, pause_s))
        try:
            async with asyncio.timeout(pause_s):
                await self._suspect.wait()
        except TimeoutError:
            pass

    async def _look(self) -> bool:
        """Check once; tell whether all is well."""
        suspected = self._suspect.is_set()
        self._suspect.clear()
        try:
            well = await is_up(self._client, self.spec, self._found.kind, self._settings.health_timeout_s)
            if well and (self._identity is None or suspected or self._unreached or self._good % _IDENTITY_EVERY == 0):
                await self._meet()
        except UpstreamError as error:
            well = False
            self._unreached = self._unreached or error.fault is UpstreamFault.UNREACHABLE
        if not well:
            self._good, self._bad = 0, self._bad + 1
            self._up = self._up and self._bad < self._settings.down_after
            return False
        self._good += 1
        if self._found.token_ids is Support.UNKNOWN and self._good % _MEASURE_EVERY == 1:
            self._measure()
        self._up = self._up or self._bad == 0 or self._good >= self._settings.up_after
        if self._up:
            self._bad = 0
        return self._up

    async def _meet(self) -> None:
        """Learn what the engine is, if it is new or restarted.

        Raises:
            UpstreamError: it went away.
        """
        limit_s = self._settings.health_timeout_s
        if self._identity is None:
            self._identity = await identify(self._client, self.spec, limit_s)
            self._learn(capabilities_of(self._identity, self.spec))
        now = await started(self._client, self.spec, self._found.kind, limit_s)
        before, unreached = self._started, self._unreached
        if before is not None and _restarted(before, now, unreached):
            self._identity = await identify(self._client, self.spec, limit_s)
            # It may have been started with other settings.
            self._learn(capabilities_of(self._identity, self.spec))
            self._measure()
            self.epoch += 1
        elif before is not None:
            # What cannot be read just now is as it was.
            now = Started(now.version or before.version, now.start_s or before.start_s)
        self._started, self._unreached = now, False

    def _measure(self) -> None:
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measured())

    async def _measured(self) -> None:
        if self._identity is not None:
            self._learn(await measure(self._client, self.spec, self._identity, self._settings.probe_timeout_s))

    def _learn(self, found: Capabilities) -> None:
        self._found = found
        self._engine = engine_for(found)


class Replicas:
    """All engines of a gateway.

    Args:
        specs: at least one, each address once.
        settings: limits of their connections.

    Raises:
        ConfigError: `option_invalid`.
    """

    def __init__(self, specs: Sequence[UpstreamSpec], settings: UpstreamSettings | None = None) -> None:
        labels = [spec.label for spec in specs]
        if not labels or len(set(labels)) != len(labels):
            got = "none" if not labels else "one address twice"
            raise ConfigError(f"expected engines at different addresses, got {got}", where="--upstream")
        self._specs = tuple(specs)
        self._settings = settings or UpstreamSettings()
        self._replicas: tuple[Replica, ...] = ()
        self._watching: list[asyncio.Task[None]] = []
        self._client: Client | None = None

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect; return when every engine has been looked at once, whether it is there or not."""
        client = self._client = Client(self._settings)
        self._replicas = tuple(Replica(spec, client, self._settings) for spec in self._specs)
        looked = [asyncio.Event() for _ in self._replicas]
        self._watching = [
            asyncio.create_task(replica.watch(first)) for replica, first in zip(self._replicas, looked, strict=True)
        ]
        await asyncio.gather(*(first.wait() for first in looked))

    async def close(self) -> None:
        """Stop looking, and close every connection."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def for_attempt(self, key: Attempt, model: str) -> Replica:
        """Return the engine that takes an attempt's calls of a model.

        Of the engines that are up, those that serve the model; where none does, any: its own answer says so best.

        Args:
            key: the attempt.
            model: the engine's own name of the model.

        Raises:
            CaptureError: `engine_unreachable`.
        """
        for task in self._watching:
            if task.done():
                # Nothing ends it but a bug, which is told here rather than to nobody.
                task.result()
        there = [replica for replica in self._replicas if replica.up]
        if not there:
            names = ", ".join(replica.label for replica in self._replicas)
            raise CaptureError(
                f"expected an engine that is up, got none of {names}",
                code=Code.ENGINE_UNREACHABLE,
                hint="start it, or see what gristmill doctor says of it",
            )
        able = [replica for replica in there if replica.serves(model)]
        return max(able or there, key=lambda replica: _weight(key, replica.label))


def _restarted(before: Started, now: Started, unreached: bool) -> bool:
    """Tell whether an engine restarted between two times that it was asked, `unreached` in between or not."""
    if None not in {before.version, now.version} and before.version != now.version:
        return True
    if before.start_s is not None and now.start_s is not None:
        return before.start_s != now.start_s
    return unreached


def _weight(key: Attempt, label: str) -> bytes:
    return sha256(f"{key.rollout_id}\n{key.attempt}\n{label}".encode()).digest()
