"""Results of a campaign: a row for each attack, one for each process, and the broken promises."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from rich.table import Table

from campaign.attack import Attack
from campaign.judgement import SILENCE, Findings, Memory, Timed, growth_bytes, missed_time_limits

MAX_KINDS, MAX_CHARACTERS = 8, 240
"""Limits on the kinds of failures shown for one attack, and on the characters of each."""
MEGABYTE = 1 << 20

FindingsByAttack = Mapping[Attack, Findings]
MemorySamples = Mapping[str, Sequence[Memory]]


def as_table(by_attack: FindingsByAttack, slowdown: float) -> Table:
    """Return a table of every attack with its figures."""
    table = Table(title=f"Seconds are {slowdown:.1f} times those of a quiet machine", title_justify="left")
    table.add_column("Attack")
    for column in ("Turns", "Tried", "Failed", "Silence, s"):
        table.add_column(column, justify="right")
    table.add_column("Other times, median / worst, s")
    table.add_column("Promises")
    for attack, findings in by_attack.items():
        silences = findings.times.get(SILENCE, [])
        others = ", ".join(f"{what} {as_times(times)}" for what, times in findings.times.items() if what != SILENCE)
        verdict = "[red]broken[/]" if broken(attack, findings, slowdown) else "[green]kept[/]"
        silence = f"{max(silences).seconds:.2f}" if silences else "–"
        table.add_row(
            attack.name, str(len(silences)), str(findings.tried), str(len(findings.failures)), silence, others, verdict
        )
    return table


def as_times(times: Sequence[Timed]) -> str:
    """Format the median and the worst time."""
    return f"{median(timed.seconds for timed in times):.2f} / {max(times).seconds:.2f}"


def memory_table(memory_samples: MemorySamples) -> Table:
    """Return a table of the memory of each process at the start, in the middle and at the end."""
    table = Table(title="Memory, MB", title_justify="left")
    table.add_column("Process")
    for column in ("Start", "Half", "End"):
        table.add_column(column, justify="right")
    for name, samples in memory_samples.items():
        moments = (samples[0], samples[(len(samples) - 1) // 2], samples[-1])
        sizes = [f"{moment.resident_bytes / MEGABYTE:.0f}" for moment in moments]
        table.add_row(name, *sizes)
    return table


def broken(attack: Attack, findings: Findings, slowdown: float) -> list[str]:
    """List the promises that an attack broke: kinds of failures with their counts, and times."""
    kinds = Counter(re.sub(r"\d+", "#", failure) for failure in findings.failures)
    examples = {re.sub(r"\d+", "#", failure): failure for failure in reversed(findings.failures)}
    shown = [f"{count} × {examples[kind][:MAX_CHARACTERS]}" for kind, count in kinds.most_common(MAX_KINDS)]
    more = [f"{len(kinds) - MAX_KINDS} more kinds"] if len(kinds) > MAX_KINDS else []
    return [
        f"{attack.name}: {line}"
        for line in [*shown, *more, *missed_time_limits(attack.promises, findings.times, slowdown)]
    ]


def verdict(by_attack: FindingsByAttack, memory_samples: MemorySamples, slowdown: float) -> list[str]:
    """List every broken promise; an empty list is success."""
    grown = {name: growth_bytes(samples) for name, samples in memory_samples.items()}
    leaks = [
        f"memory of {name}: {grown_bytes / MEGABYTE:.0f} MB more than at half"
        for name, grown_bytes in grown.items()
        if grown_bytes
    ]
    return [line for attack, findings in by_attack.items() for line in broken(attack, findings, slowdown)] + leaks
