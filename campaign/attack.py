"""One turn of an attack: check the server, start honest streams with another key, attack, and judge.

A turn does one thing that takes seconds. The next turn goes to the attack that has had the least of its share of time.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx2

from campaign.honest import MODELS, HonestStream, honest_stream
from campaign.judgement import PROMISES, SILENCE, Findings, Promise
from campaign.server import Server
from tests.hub.stand_in import StandInHub

READY_SECONDS = 60.0
TURN_SECONDS = 240.0
"""Longest turn, in seconds."""


@dataclass(frozen=True, slots=True)
class TurnContext:
    """Context of a turn: the server, an attacker's key, a scripted hub, and a random generator."""

    server: Server
    key: str
    hub: StandInHub
    rng: random.Random
    findings: Findings
    tried: int = 0
    """How much this attack has tried in its earlier turns."""
    steps: list[tuple[float, str]] = field(default_factory=list)
    """Steps of the attack, each with the moment at which it began."""

    def begin(self, step: str) -> None:
        """Record the step that begins now, so that a silence can be attributed to it."""
        self.steps.append((time.monotonic(), step))

    def client(self) -> httpx2.AsyncClient:
        """Return a client with the attacker's key."""
        return self.server.client(self.key)


RESTART_ROUTE = "/admin/api/restart"
"""Route that no attack calls: it ends the server once all streams have ended, and the honest one never does."""


@dataclass(frozen=True, slots=True, eq=False)
class Attack:
    """One kind of attack."""

    name: str
    summary: str
    turn: Callable[[TurnContext], Awaitable[None]]
    share: float = 1.0
    """Share of the time, relative to the shares of others."""
    promises: Mapping[str, Promise] = field(default_factory=lambda: {SILENCE: PROMISES[SILENCE]})
    """Promised time limits, by what is timed."""
    may_end: tuple[str, ...] = ()
    """Ways in which the attack may end the honest stream; any other end is a failure."""


def next_attack(attacks: Sequence[Attack], spent_seconds: Mapping[str, float]) -> Attack:
    """Return the attack that has had the least of its share; each gets a first turn before any gets a second one."""
    return min(attacks, key=lambda attack: spent_seconds.get(attack.name, 0.0) / attack.share)


async def take_turn(attack: Attack, server: Server, hub: StandInHub, rng: random.Random, tried: int) -> Findings:
    """Take one turn, after earlier ones that `tried` so much, and return its findings. If the server has to be
    restarted first, that is a failure."""
    findings = Findings()
    if not await server.is_ready(READY_SECONDS):
        findings.failures.append(f"the server is not ready after {READY_SECONDS:.0f} s, and is started anew")
        await server.stop()
        await server.start()
    try:
        await server.revoke_keys()  # of earlier turns, up to 200 keys
        async with contextlib.AsyncExitStack() as streams:
            key = await server.new_key()
            models = MODELS if SILENCE in attack.promises else MODELS[:1]  # a killed worker loads all again
            honest = [await streams.enter_async_context(honest_stream(server.address, key, model)) for model in models]
            if silent := [stream for stream in honest if not await stream.wait_for_start()]:
                findings.failures.append(f"the honest stream of {silent[0].model} does not begin: {silent[0].last}")
            else:
                await run_attack(attack, TurnContext(server, await server.new_key(), hub, rng, findings, tried), honest)
        findings.failures += await release_quarantined(server)
    except (RuntimeError, httpx2.TransportError) as error:
        findings.failures.append(f"the turn broke off: {error!r}")
    return findings


async def run_attack(attack: Attack, context: TurnContext, honest: Sequence[HonestStream]) -> None:
    """Run the attack itself while the honest streams are observed."""
    findings, since = context.findings, time.monotonic()
    context.server.new_tracebacks()
    try:
        async with asyncio.timeout(TURN_SECONDS):
            await attack.turn(context)
    except TimeoutError:
        findings.failures.append(f"not over after {TURN_SECONDS:.0f} s")
    finally:
        silences = [(*await stream.silence(since), stream.model) for stream in honest]
        seconds, began, model = max(silences)
        step = next((step for moment, step in reversed(context.steps) if moment <= began), "")
        findings.record_time(SILENCE, seconds, f"{step} ({model})".strip())
    ends = [end for stream in honest for end in stream.ends(since) if not end.startswith(attack.may_end)]
    findings.failures += [f"the honest stream: {end}" for end in ends[:1]]
    findings.expect(
        not (traceback_count := context.server.new_tracebacks()), f"{traceback_count} tracebacks in the log"
    )


async def release_quarantined(server: Server) -> list[str]:
    """Release models from quarantine for the next attack; return why they were there, or why that is not known."""
    if not await server.is_ready(READY_SECONDS):
        return [f"the server is not ready {READY_SECONDS:.0f} s after the turn"]
    blamed = (await server.call("GET", "/api/status"))["quarantined"]
    for model in blamed:
        await server.call("POST", "/api/release", {"model": model})
    return [f"quarantined: {why}" for why in blamed.values()]
