"""A machine with known costs and a text with known acceptance: what the governor earns on it, against fixed lengths."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from app.scheduler.speculation import Choice, DraftObservation, Governor, StepObservation


@dataclass(frozen=True)
class Drafter:
    """`acceptance` per position given the one before; `proposal_rate` how often it has anything to propose."""

    acceptance: float
    seconds_per_token: float = 0.0
    proposal_rate: float = 1.0


@dataclass
class Machine:
    """Verify cost by width (seconds), and the drafters that run on it."""

    verify_seconds: Callable[[int], float]
    drafters: dict[str, Drafter]
    noise: float = 0.0

    def step(self, choice: Choice, chance: random.Random) -> StepObservation:
        drafter = self.drafters.get(choice.method)
        asked = choice.num_draft_tokens
        drafted = asked if drafter and chance.random() < drafter.proposal_rate else 0
        accepted = 0
        while drafter and accepted < drafted and chance.random() < drafter.acceptance:
            accepted += 1
        draft_seconds = drafter.seconds_per_token * drafted if drafter else 0.0
        seconds = self.verify_seconds(1 + drafted) * (1 + self.noise * chance.random()) + draft_seconds
        drafts = (DraftObservation(choice.method, asked, drafted, accepted),)
        return StepObservation(1, 1 + drafted, seconds, draft_seconds, drafts)


def governed_rate(machine: Machine, steps: int, seed: int = 0, governor: Governor | None = None) -> float:
    """Tokens per second over `steps` steps of one row, start-up included."""
    governor, chance = governor or Governor(), random.Random(seed)
    tokens, seconds = 0, 0.0
    for _ in range(steps):
        step = machine.step(governor.choose(1, 1, tuple(machine.drafters)), chance)
        governor.observe(step)
        tokens += 1 + step.drafts[0].accepted
        seconds += step.seconds
    return tokens / seconds


def fixed_rate(machine: Machine, choice: Choice) -> float:
    """Expected tokens per second when every step makes this choice: exact, not sampled."""
    drafter, length = machine.drafters.get(choice.method, Drafter(0.0)), choice.num_draft_tokens
    accepted = sum(drafter.acceptance**position for position in range(1, length + 1))
    plain, verify = machine.verify_seconds(1), machine.verify_seconds(1 + length)
    forward = drafter.proposal_rate * verify + (1 - drafter.proposal_rate) * plain
    seconds = forward * (1 + machine.noise / 2) + drafter.proposal_rate * length * drafter.seconds_per_token
    return (1 + drafter.proposal_rate * accepted) / seconds


def best_fixed_rate(machine: Machine) -> float:
    return max(
        fixed_rate(machine, Choice(method, length))
        for method in machine.drafters
        for length in range(17 if method == "ngram" else 9)
    )
