"""`make campaign`: attacks a real server in turns, prints a table, and exits with 1 if a promise is broken."""

import asyncio
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from campaign.attack import Attack, next_attack, take_turn
from campaign.judgement import SILENCE, Findings, Memory, measured_slowdown, missed_time_limits
from campaign.plan import LEGS, QUIET, SHARES, chosen_legs
from campaign.server import Server
from campaign.table import MEGABYTE, as_table, memory_table, verdict
from tests.hub.stand_in import StandInHub, stand_in_hub

MINUTE_SECONDS = 60.0
FIRST_QUIET_TURNS = 3
"""Quiet turns before any attack, to measure how slow this machine is."""


@dataclass
class Campaign:
    """Findings so far, and the console to print them on."""

    console: Console
    rng: random.Random
    findings: dict[Attack, Findings] = field(default_factory=dict)
    memory_samples: dict[str, list[Memory]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    async def attack(self, leg: str, attacks: tuple[Attack, ...], seconds: float) -> None:
        """Take turns on a new server until the time is over; each attack gets at least one turn."""
        with TemporaryDirectory(prefix="paceline-campaign-") as folder, stand_in_hub() as hub:
            server = Server(Path(folder), hub.address)
            try:
                await server.start()
                await self._take_turns(leg, attacks, time.monotonic() + seconds, server, hub)
            finally:
                ended_by_itself = await server.stop()
                quiet = self.findings.setdefault(QUIET, Findings())
                quiet.expect(ended_by_itself, f"the server of the leg {leg} had to be killed at its end")

    async def _take_turns(
        self, leg: str, attacks: tuple[Attack, ...], ends_at: float, server: Server, hub: StandInHub
    ) -> None:
        spent_seconds: dict[str, float] = {}
        first_attacks = [QUIET] * (0 if self.findings else FIRST_QUIET_TURNS)
        while time.monotonic() < ends_at or len(spent_seconds) < len(attacks):
            attack, began = (
                first_attacks.pop() if first_attacks else next_attack(attacks, spent_seconds),
                time.monotonic(),
            )
            logged_bytes = server.log.stat().st_size
            so_far = self.findings.setdefault(attack, Findings())
            findings = await take_turn(attack, server, hub, self.rng, so_far.tried)
            so_far.add(findings)
            memory = server.memory()
            for process, sample in memory.items():
                self.memory_samples.setdefault(f"{leg}: {process}", []).append(sample)
            spent_seconds[attack.name] = spent_seconds.get(attack.name, 0.0) + time.monotonic() - began
            self._print_result(attack, findings, memory)
            if missed_time_limits(attack.promises, findings.times, self._slowdown):
                self._print_indented("the server's log of this turn:", *server.log_lines(logged_bytes))

    def _print_result(self, attack: Attack, result: Findings, memory: Mapping[str, Memory]) -> None:
        times = ", ".join(
            f"{what} {max(measured).seconds:.2f} s {max(measured).about}".strip()
            for what, measured in result.times.items()
        )
        minutes, seconds = divmod(int(time.monotonic() - self.began), 60)
        sizes = ", ".join(f"{name} {sample.resident_bytes / MEGABYTE:.0f} MB" for name, sample in memory.items())
        tries = f"{result.tried} tried, {len(result.failures)} failed"
        line = f"{minutes:3d}:{seconds:02d} {attack.name}: {tries}, {times}; {sizes}"
        self._print_indented(line, *result.failures[:3])

    def _print_indented(self, line: str, *more: str) -> None:
        self.console.print("\n       ".join([line, *more]), markup=False, highlight=False, soft_wrap=True)

    @property
    def _slowdown(self) -> float:
        quiet = self.findings.get(QUIET, Findings()).times.get(SILENCE, ())
        return measured_slowdown([timed.seconds for timed in quiet])

    def conclude(self) -> int:
        """Print the tables and the broken promises; return the exit code."""
        self.console.print(as_table(self.findings, self._slowdown), memory_table(self.memory_samples))
        broken = verdict(self.findings, self.memory_samples, self._slowdown)
        for line in broken:
            self.console.print(f"Broken: {line}", markup=False, highlight=False, soft_wrap=True)
        return 1 if broken else 0


def list_attacks() -> Table:
    """Return a table of the attacks' names and summaries."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for attack in dict.fromkeys(attack for attacks in LEGS.values() for attack in attacks):
        table.add_row(f"[bold]{attack.name}[/]", attack.summary)
    return table


async def run(campaign: Campaign, legs: dict[str, tuple[Attack, ...]], minutes: float) -> None:
    """Run every leg for its share of the time."""
    for leg, attacks in legs.items():
        share = SHARES[leg] / sum(SHARES[other] for other in legs)
        await campaign.attack(leg, attacks, share * minutes * MINUTE_SECONDS)


def main(
    *,
    minutes: Annotated[float, typer.Option(min=0, help="Minutes to attack; each attack has at least one turn.")] = 60,
    attack: Annotated[list[str] | None, typer.Option(help="Run only this attack; repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of what is chosen by chance.")] = 0,
    attacks: Annotated[bool, typer.Option("--list", help="List the attacks and exit.")] = False,
) -> None:
    """Attack a real Paceline server in turns, while an honest stream with another key runs.

    The table shows for each attack the number of tries and failures, and the longest silence of the honest stream.
    The exit code is 1 if a promise is broken. Ctrl-C ends the campaign with the table so far.
    """
    console = Console(width=None if sys.stdout.isatty() else 200)
    if attacks:
        console.print(list_attacks())
        return
    try:
        legs = chosen_legs(attack or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let background jobs ignore SIGINT
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # SIGTERM prints the table too
    campaign = Campaign(console, random.Random(seed))
    try:
        asyncio.run(run(campaign, legs, minutes))
    except KeyboardInterrupt:
        console.print("Interrupted: the table so far.")
    except RuntimeError as error:  # a server that does not start
        console.print(error, markup=False)
        campaign.conclude()
        sys.exit(1)
    sys.exit(campaign.conclude())


if __name__ == "__main__":
    typer.run(main)
