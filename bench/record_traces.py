"""Records every drafter's drafts at every position of the ten workloads' texts, the target's confidence in each token,
in thousandths, and the cost of steps on this machine: `nice -n -15 python bench/record_traces.py` writes them to
tests/scheduler/traces.json, and tests replay the governor on them.

Outcomes do not depend on time. A text is generated several times: with plain steps up to the next position without a
record, then with a draft step there, until every position has a record. Costs are medians of many runs.
"""
# ruff: noqa: E402 - what follows `prepare` imports mlx, and has to come after it

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from app.engine import platform

PREPARATION = platform.prepare()

from app.core.request import Request, SamplingParameters
from app.core.step import DecodeRow, DecodeStep, Offer, PrefillRow, PrefillStep, RowOutcome, StepResult
from app.engine.engine import Engine
from app.models.draft_lengths import DRAFT_LENGTHS
from bench.comparison.governor_case import DRAFTERS, LoadedModel, WorkloadRunner
from bench.comparison.workloads import ASSISTANT, LONGEST_ANSWER_TOKENS, WORKLOADS

TRACES = Path(__file__).resolve().parents[1] / "tests" / "scheduler" / "traces.json"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
LONGEST = DRAFT_LENGTHS[-1]
PERIOD, TEXT_TOKENS, LONG_TEXT_TOKENS, PLAIN_STEPS = 6, 96, 480, 6
MORE_TOKENS = LONG_TEXT_TOKENS - TEXT_TOKENS


class EngineRequest:
    """One request that an engine runs."""

    def __init__(self, engine: Engine, name: str, prompt: Sequence[int], sampling: SamplingParameters) -> None:
        self.engine, self.name = engine, name
        self.tokens, self.prompt = list(prompt), len(prompt)
        limit = engine.limits.max_context_tokens
        self.computed = engine.admit(Request(id=name, prompt_tokens=tuple(prompt), max_tokens=limit, sampling=sampling))

    def read(self) -> None:
        """Prefill the prompt except its last token."""
        while self.computed < len(self.tokens) - 1:
            end = min(len(self.tokens) - 1, self.computed + self.engine.limits.prefill_chunk_tokens)
            self.engine.step(PrefillStep((PrefillRow(self.name, self.tokens, self.computed, end),)))
            self.computed = end

    def row(self, method: str, drafts: int, remaining: int = 0) -> DecodeRow:
        return DecodeRow(self.name, self.tokens, self.prompt, self.computed, remaining or drafts + 1, method, drafts)

    def take(self, outcome: RowOutcome) -> None:
        self.tokens.extend(outcome.emitted)
        self.computed = outcome.computed

    def step(self, method: str, drafts: int) -> RowOutcome:
        """Run one step. `remaining` is 1 in plain steps, so that nothing is launched ahead of a later draft step."""
        outcome = self.engine.step(DecodeStep((self.row(method, drafts),))).outcomes[0]
        self.take(outcome)
        return outcome

    def end(self) -> None:
        self.engine.release(self.name, ())


def trace(engine: Engine, method: str, prompt: Sequence[int], count: int, sampling: SamplingParameters) -> list[str]:
    """Return three strings with a digit per position: drafts proposed, drafts accepted, tokens matched by an offer."""
    proposed, accepted, matched = [-1] * count, [0] * count, [0] * count
    while -1 in proposed:
        text = EngineRequest(engine, "trace", prompt, sampling)
        text.read()
        while (place := len(text.tokens) - len(prompt)) < count and -1 in proposed:
            if proposed[place] >= 0:
                text.step("off", 0)
                continue
            offer = engine.drafters.offers(text.name, text.tokens, ()).get(method, Offer())
            outcome = text.step(method, LONGEST)
            proposed[place], accepted[place] = outcome.drafted, outcome.accepted
            matched[place] = offer.matched_tokens
        text.end()
    return ["".join(DIGITS[value] for value in values) for values in (proposed, accepted, matched)]


def confidences(engine: Engine, prompt: Sequence[int], count: int, sampling: SamplingParameters) -> list[int]:
    """Return the target's confidence at each position, in thousandths."""
    text, values = EngineRequest(engine, "confidences", prompt, sampling), list[float]()
    text.read()
    while len(values) < count:
        values += text.step("off", 0).confidences
    text.end()
    return [round(1_000 * value) for value in values]


def record(model: LoadedModel) -> Iterator[dict[str, Any]]:
    """Yield the traces of one model's workloads."""
    engine = model.engine
    for workload in WORKLOADS:
        if DRAFTERS.get(workload.model) != DRAFTERS[model.name]:
            continue
        turns = WorkloadRunner(workload, model, max_tokens=LONGEST_ANSWER_TOKENS, quick=False)
        requests = []
        for prompts, count in turns.groups:
            for prompt in prompts:
                traces = {
                    method: trace(engine, method, prompt, count, workload.sampling) for method in engine.limits.drafters
                }
                sure = confidences(engine, prompt, count, workload.sampling)
                requests.append({"prompt": len(prompt), "tokens": count, "confidences": sure, "traces": traces})
                print(f"{workload.name}: {len(requests)}", file=sys.stderr, flush=True)
        yield {"name": workload.name, "model": model.name, "together": workload.together, "requests": requests}


class Costs:
    """Measured seconds by method, rows and drafts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
        self.reading: dict[str, dict[int, list[float]]] = {}

    def measure(self, rows: int, method: str, drafts: int) -> None:
        texts = self._texts(rows, TEXT_TOKENS)
        for time_of in range(2):
            result = self._step(texts, method, drafts, drafts + 1)
            if time_of and result.width > 1:
                drafting = result.phase_seconds.draft_seconds if result.phase_seconds else 0.0
                self._add((method, rows, result.width - 1), result.seconds - drafting, drafting)
        self._end(texts)

    def measure_plain(self, rows: int) -> None:
        """Measure the inner steps of a plain run, and a single step with nothing launched ahead (kept as -1 drafts)."""
        texts = self._texts(rows, TEXT_TOKENS)
        seconds = [self._step(texts, "off", 0, left).seconds for left in range(PLAIN_STEPS, 0, -1)]
        self._add(("off", rows, 0), median(seconds[1:-1]), 0.0)
        self._add(("off", rows, -1), self._step(texts, "off", 0, 1).seconds, 0.0)
        self._end(texts)

    def measure_reading(self, method: str) -> None:
        """Measure drafting one token after a text that the drafter has not read."""
        for length in (TEXT_TOKENS, LONG_TEXT_TOKENS):
            texts = self._texts(1, length)
            phase_seconds = self._step(texts, method, 1, 2).phase_seconds
            seconds = phase_seconds.draft_seconds if phase_seconds else 0.0
            self._end(texts)
            self.reading.setdefault(method, {}).setdefault(length, []).append(seconds)

    def _add(self, shape: tuple[str, int, int], seconds: float, draft_seconds: float) -> None:
        self.shapes.setdefault(shape, []).append((seconds, draft_seconds))

    def _texts(self, rows: int, length: int) -> list[EngineRequest]:
        prompt = [1 + 37 * (place % PERIOD) % 89 for place in range(length)]
        texts = [
            EngineRequest(self.engine, f"cost-{row}", prompt, SamplingParameters(temperature=0.0))
            for row in range(rows)
        ]
        for text in texts:
            text.read()
        return texts

    def _step(self, texts: Sequence[EngineRequest], method: str, drafts: int, remaining: int) -> StepResult:
        """Run one step of several rows; replace what was drawn, so that the texts keep repeating themselves."""
        rows = tuple(text.row(method, drafts, remaining) for text in texts)
        result = self.engine.step(DecodeStep(rows, timed=True))
        for text, outcome in zip(texts, result.outcomes, strict=True):
            text.take(outcome)
            for place in range(text.prompt, len(text.tokens)):
                text.tokens[place] = text.tokens[place - PERIOD]
        return result

    def _end(self, texts: Sequence[EngineRequest]) -> None:
        for text in texts:
            text.end()


def costs_of(engine: Engine, rows: Sequence[int], seconds: float) -> dict[str, Any]:
    """Measure all shapes, round after round, for `seconds`."""
    costs, ends, rounds = Costs(engine), time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        for count in rows:
            costs.measure_plain(count)
            for method in engine.limits.drafters:
                longest = engine.limits.longest_drafts.get(method, LONGEST)
                for drafts in sorted({min(length, longest) for length in DRAFT_LENGTHS}):
                    costs.measure(count, method, drafts)
        for method in engine.limits.drafters:
            costs.measure_reading(method)
        rounds += 1
    print(f"{rounds} rounds", file=sys.stderr, flush=True)
    return {
        "steps": [
            [*shape, *(round(median(part), 6) for part in zip(*phase_seconds, strict=True))]
            for shape, phase_seconds in sorted(costs.shapes.items())
        ],
        "reading": {
            method: round((median(known[LONG_TEXT_TOKENS]) - median(known[TEXT_TOKENS])) / MORE_TOKENS, 8)
            for method, known in costs.reading.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="for the costs of each model")
    parser.add_argument("--only", choices=("costs", "texts"), help="keep the other half as it is")
    arguments = parser.parse_args()
    kept = json.loads(TRACES.read_text()) if arguments.only and TRACES.exists() else {}
    models: dict[str, Any] = kept.get("models", {})
    workloads: list[Any] = []
    for name in DRAFTERS:
        model = LoadedModel(name)
        limits = model.engine.limits
        if arguments.only != "texts":
            costs = costs_of(model.engine, (1, 4) if name == ASSISTANT else (1,), arguments.seconds)
            models[name] = {"drafters": limits.drafters, "longest": dict(limits.longest_drafts), **costs}
        if arguments.only != "costs":
            workloads += record(model)
        model.close()
    order = [workload.name for workload in WORKLOADS]
    workloads = sorted(workloads, key=lambda workload: order.index(workload["name"])) or kept.get("workloads", [])
    TRACES.write_text(json.dumps({"models": models, "workloads": workloads}, indent=0) + "\n")


if __name__ == "__main__":
    main()
