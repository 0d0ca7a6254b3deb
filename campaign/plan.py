"""The attacks, which of them share a server, and how the time is divided."""

import asyncio
import sys
from collections.abc import Sequence

from campaign.attack import Attack, TurnContext
from campaign.attacks.bodies import hostile_bodies
from campaign.attacks.cancels import cancel, never_read
from campaign.attacks.constraints import hostile_constraints
from campaign.attacks.crashes import kill_server
from campaign.attacks.fuzz import fuzz
from campaign.attacks.hoards import hoard_conversations, hoard_responses
from campaign.attacks.hubs import lying_hubs
from campaign.attacks.stores import damaged_store
from campaign.attacks.wire import expensive_requests, half_requests
from campaign.attacks.workers import kill_worker, stop_worker, suspend_all
from campaign.judgement import CHILDREN_GONE, FIRST_TOKEN, PROMISES

QUIET_SECONDS = 5.0


async def be_quiet(_context: TurnContext) -> None:
    """Send nothing for some seconds while a process keeps one core busy, as an attacker does, to measure how slow the
    machine is now."""
    busy = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await asyncio.sleep(QUIET_SECONDS)
    finally:
        busy.kill()
        await busy.wait()


QUIET = Attack("quiet", "nobody attacks: how slow this machine is", be_quiet, 0.5, {})
ENDS = ("error", "refused", "cut")
LEGS: dict[str, tuple[Attack, ...]] = {
    "requests": (
        QUIET,
        Attack("fuzz", "schemathesis over every route", fuzz, 1, may_end=ENDS),
        Attack("bodies", "JSON that no client sends, on every route that changes something", hostile_bodies, 2),
    ),
    "costs": (
        QUIET,
        Attack("cancels", "requests given up at any moment", cancel, 2),
        Attack("non-readers", "answers that nobody reads", never_read, 0.5),
        Attack("wire", "chunks of one byte and other costly HTTP, with a key or without", expensive_requests, 2),
        Attack("connections", "thousands of connections, half heads, slow bodies", half_requests, 0.5),
        Attack("constraints", "hostile schemas, expressions and grammars", hostile_constraints, 3),
        Attack("hubs", "hubs that lie about sizes, counts and names", lying_hubs, 1.5),
        Attack("responses", "one key fills the kept responses", hoard_responses, 0.7),
        Attack("conversations", "thousands of conversations", hoard_conversations, 0.3),
    ),
    "crashes": (
        QUIET,
        Attack(
            "worker kills",
            "SIGKILL of the worker under streams",
            kill_worker,
            13,
            {FIRST_TOKEN: PROMISES[FIRST_TOKEN]},
            ENDS,
        ),
        Attack(
            "worker stops",
            "SIGSTOP of the worker under streams",
            stop_worker,
            0.7,
            {FIRST_TOKEN: PROMISES[FIRST_TOKEN]},
            ENDS,
        ),
        Attack("suspends", "SIGSTOP and SIGCONT of the whole server", suspend_all, 0.5, {}),
        Attack(
            "server kills",
            "SIGKILL of the server while it writes",
            kill_server,
            6,
            {CHILDREN_GONE: PROMISES[CHILDREN_GONE]},
            ENDS,
        ),
        Attack("stores", "damaged bytes and values in the store", damaged_store, 1, {}),
    ),
}
"""Attacks that share a server, by name of the leg."""
SHARES = {"requests": 0.12, "costs": 0.28, "crashes": 0.6}


def chosen_legs(names: Sequence[str]) -> dict[str, tuple[Attack, ...]]:
    """Return the attacks with these names, or all, and the quiet turns of their legs. Raises ValueError."""
    known = [attack.name for attacks in LEGS.values() for attack in attacks]
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"no attack is called {', '.join(unknown)}; there are {', '.join(dict.fromkeys(known))}")
    wanted = {leg: [attack for attack in attacks if attack.name in names or not names] for leg, attacks in LEGS.items()}
    return {leg: tuple(dict.fromkeys([QUIET, *attacks])) for leg, attacks in wanted.items() if attacks}
