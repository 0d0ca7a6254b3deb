"""A simulated machine with known costs and acceptance: the governor's rate on it, and those of fixed draft lengths."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.core.step import Offer, StepCost
from app.models.draft_lengths import DRAFT_LENGTHS
from app.scheduler.estimates import DraftingRow, DraftObservation
from app.scheduler.governor import PLAIN, Governor, Option, StepObservation

PLAIN_SECONDS = 0.020
MATCHED_TOKENS = 3


@dataclass(frozen=True)
class Drafter:
    """`acceptance` is the probability of each draft if those before it were accepted; drafting costs `seconds` plus
    `seconds_per_token` for each draft. `proposal_rate` is the probability of having anything to propose; below 1, it is
    a lookup drafter, which makes offers. `block` is the maximum number of drafts.
    """

    acceptance: float
    seconds_per_token: float = 0.0
    proposal_rate: float = 1.0
    seconds: float = 0.0
    block: int = 16

    @property
    def looks_up(self) -> bool:
        return self.proposal_rate < 1

    def draft_seconds(self, drafts: int) -> float:
        return self.seconds + self.seconds_per_token * drafts if drafts else 0.0

    def hits(self, most: int, chance: random.Random) -> int:
        """Return how many of `most` drafts are right before the first wrong one."""
        return next((place for place in range(most) if chance.random() >= self.acceptance), most)


@dataclass
class Machine:
    """Seconds of a verify forward over all rows, by its width, and the drafters that run on the machine."""

    verify_seconds: Callable[[int], float]
    drafters: dict[str, Drafter]
    noise: float = 0.0

    def step(self, choice: Option, chance: random.Random, *rows: DraftingRow, timed: bool = False) -> StepObservation:
        drafter, drafts = self.drafters.get(choice.method), []
        for row in rows:
            asked = choice.num_draft_tokens
            has = len(row.offered[choice.method].tokens) if choice.method in row.offered else asked
            drafted = min(asked, has, drafter.block) if drafter else 0
            accepted = drafter.hits(drafted, chance) if drafter else 0
            drafts.append(DraftObservation(choice.method, asked, drafted, accepted, row))
        widest = max(draft.drafted for draft in drafts)
        drafting = drafter.draft_seconds(widest) if drafter else 0.0
        seconds = self.verify_seconds(1 + widest) * (1 + self.noise * chance.random()) + drafting
        return StepObservation(len(rows), 1 + widest, seconds, drafting if timed and widest else None, tuple(drafts))

    def offers(self, chance: random.Random) -> dict[str, Offer]:
        """Return the current offers of the lookup drafters."""
        match = Offer((0,) * DRAFT_LENGTHS[-1], MATCHED_TOKENS)
        lookups = {name: drafter.proposal_rate for name, drafter in self.drafters.items() if drafter.looks_up}
        return {name: match if chance.random() < rate else Offer() for name, rate in lookups.items()}

    def hindsight(self, step: StepObservation, chance: random.Random) -> list[DraftObservation]:
        """Return what a step shows about the offers made before it."""
        observations = []
        offers = [(draft, name, offer) for draft in step.drafts for name, offer in draft.row.offered.items()]
        for ran, name, offer in offers:
            tokens = 1 + ran.accepted
            if offer.tokens and name == ran.method:
                observations.append(ran._replace(match=MATCHED_TOKENS.bit_length()))
            elif offer.tokens:
                hits = self.drafters[name].hits(tokens, chance)
                tried = min(hits + 1, tokens)
                observations.append(DraftObservation(name, tried, tried, hits, ran.row, MATCHED_TOKENS.bit_length()))
        return observations

    def measured(self, rows: int = 1) -> tuple[StepCost, ...]:
        """Return the costs that a warm-up would have measured."""
        costs = [StepCost("off", rows, 0, self.verify_seconds(1))]
        for method, drafter in self.drafters.items():
            for length in DRAFT_LENGTHS:
                drafts = min(length, drafter.block)
                costs.append(
                    StepCost(method, rows, drafts, self.verify_seconds(1 + drafts), drafter.draft_seconds(drafts))
                )
        return tuple(costs)


@dataclass(frozen=True)
class Workload:
    """A machine and its consecutive `texts`: the length of each in tokens, and how well the drafters do on it."""

    verify_seconds: Callable[[int], float]
    texts: Sequence[tuple[int, dict[str, Drafter]]]
    noise: float = 0.05

    def machines(self) -> list[tuple[int, Machine]]:
        return [(steps, Machine(self.verify_seconds, drafters, self.noise)) for steps, drafters in self.texts]


def governed_seconds(
    machine: Machine,
    tokens: float,
    *,
    governor: Governor,
    chance: random.Random,
    request_id: str = "r",
    rows: int = 1,
) -> float:
    """Return the seconds in which `rows` rows emit `tokens` tokens each, on average."""
    seconds, emitted = 0.0, [0] * rows
    while sum(emitted) < rows * tokens:
        drafting = [
            DraftingRow(f"{request_id} {row}", said, machine.offers(chance)) for row, said in enumerate(emitted)
        ]
        choice = governor.choose(rows, drafting, tuple(machine.drafters))
        timed = choice.num_draft_tokens > 0 and governor.costs.must_time(
            choice.method, rows=rows, drafts=choice.num_draft_tokens
        )
        step = machine.step(Option(choice.method, choice.num_draft_tokens), chance, *drafting, timed=timed)
        governor.observe(step)
        governor.observe_drafts(machine.hindsight(step, chance))
        emitted = [said + 1 + draft.accepted for said, draft in zip(emitted, step.drafts, strict=True)]
        seconds += step.seconds
    return seconds


def governed_rate(machine: Machine, steps: int, seed: int = 0, governor: Governor | None = None) -> float:
    """Return the tokens per second of one row that emits as many tokens as `steps` plain steps, start-up included."""
    governor = governor or Governor()
    return steps / governed_seconds(machine, steps, governor=governor, chance=random.Random(seed))


def fixed_rate(machine: Machine, choice: Option = PLAIN) -> float:
    """Return the expected tokens per second if every step makes this choice: exact, not sampled."""
    drafter = machine.drafters.get(choice.method, Drafter(0.0))
    length = min(choice.num_draft_tokens, drafter.block)
    accepted = sum(drafter.acceptance**position for position in range(1, length + 1))
    plain, verify = machine.verify_seconds(1), machine.verify_seconds(1 + length)
    forward = drafter.proposal_rate * verify + (1 - drafter.proposal_rate) * plain
    seconds = forward * (1 + machine.noise / 2) + drafter.proposal_rate * drafter.draft_seconds(length)
    return (1 + drafter.proposal_rate * accepted) / seconds


def fixed_seconds(workload: Workload, choice: Option) -> float:
    return sum(tokens / fixed_rate(machine, choice) for tokens, machine in workload.machines())


def options(machine: Machine) -> list[Option]:
    return [PLAIN, *(Option(method, length) for method in machine.drafters for length in range(1, 17))]


def best_fixed_rate(machine: Machine) -> float:
    return max(fixed_rate(machine, option) for option in options(machine))


def workload_seconds(workload: Workload, *, seed: int = 0, warm: bool = True) -> float:
    """Return the seconds of all texts under one governor; every two consecutive texts belong to one request."""
    machines = workload.machines()
    governor = Governor(machines[0][1].measured() if warm else ())
    chance = random.Random(seed)
    return sum(
        governed_seconds(machine, tokens, governor=governor, chance=chance, request_id=f"r{number // 2}")
        for number, (tokens, machine) in enumerate(machines)
    )


def drain(governor: Governor, machine: Machine, count: int) -> list[Option]:
    """Return the governor's choices in `count` steps on a machine that accepts no draft."""

    def turn(emitted: int) -> Option:
        row = DraftingRow("r", emitted)
        choice = governor.choose(1, (row,), tuple(machine.drafters))
        option = Option(choice.method, choice.num_draft_tokens)
        governor.observe(machine.step(option, random.Random(0), row))
        return option

    return [turn(emitted) for emitted in range(count)]
