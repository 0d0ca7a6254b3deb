"""The governor over ten mixed workloads of the embedded models, against plain decoding and fixed draft lengths.

A sweep finds the best fixed setting of each workload and the best single setting for all. Then the governor takes turns
with these two in separate rounds, because the winner of a sweep owes its place partly to luck. Each round covers all
workloads; all settings answer the same requests, in an order that rotates from round to round. The fixed settings share
one scheduler and the governor has its own, so that it learns only from its own steps: it starts from the costs measured
when the model was loaded, and goes through one workload after the other, as in a server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from app.core.request import SpeculationRequest
from app.core.unit import DrafterSpecification, ModelSpecification
from app.engine.engine import Engine
from app.serving.sweep.grid import GOVERNOR, LENGTHS, PLAIN, Setting
from app.text.prompt.template import TextModel
from bench.comparison.cases import TOKENS_PER_SECOND, Bench, Case
from bench.comparison.measure import CaseResult, Check, Sample, Series
from bench.comparison.ours import OurSide
from bench.comparison.verdict import Rates, RatesBySetting, best_single, effective_setting, summarise
from bench.comparison.workloads import ASSISTANT, HYBRID, LONGEST_ANSWER_TOKENS, WORKLOADS, Workload
from bench.comparison.workshop import DEMO_MODELS

DRAFTERS = {
    ASSISTANT: {
        "draft_model": "demo-draft",
        "dflash": "demo-assistant-dflash",
        "eagle3": "demo-assistant-eagle3",
    },
    HYBRID: {"mtp": "demo-hybrid-mtp"},
}
FIXED_LENGTHS, QUICK_LENGTHS = (1, 4, 7, 15), (4,)
WARM_UP_TOKENS = 16
QUICK_BELOW_TOKENS, QUICK_REQUESTS = 100, 2
"""Number of tokens below which a run counts as a smoke test, and requests per workload in such a run."""
TURNS_PER_ROUND = 5
"""Turns of the governor and of each competitor per round of the sweep: several, because these turns decide."""
MIN_WORST_RATIO, MIN_MEAN_RATIO, MIN_MEAN_OVER_SINGLE = 0.9, 0.95, 1.0


@dataclass(slots=True)
class WorkloadResult:
    """Totals of one setting over the requests of one workload."""

    tokens: int = 0
    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Rate from the first prompt token of the first request to the last generated token of the last one."""
        return self.tokens / self.seconds

    def shares(self) -> dict[str, float]:
        """Return the share of the steps by method, in percent."""
        total = sum(self.steps.values()) or 1
        return {"plain" if name == "off" else name: 100 * count / total for name, count in self.steps.items()}


class LoadedModel:
    """One embedded model with all its drafters, with one scheduler for the fixed settings and one for the governor."""

    def __init__(self, name: str) -> None:
        self.name = name
        folder = DEMO_MODELS / name
        drafts = (
            DrafterSpecification(draft, str(DEMO_MODELS / draft), method) for method, draft in DRAFTERS[name].items()
        )
        self._fixed = OurSide(
            ModelSpecification(id=name, path=str(folder), drafters=tuple(drafts), prefix_cache_bytes=0)
        )
        self._governor = self._fixed.with_new_scheduler()
        self.text = TextModel.load(folder)

    @property
    def engine(self) -> Engine:
        """Engine that all settings share."""
        return self._fixed.engine

    def close(self) -> None:
        """Free the model."""
        self._fixed.close()

    def side(self, setting: Setting) -> OurSide:
        """Return the side that runs a setting."""
        return self._governor if setting == GOVERNOR else self._fixed

    def settings(self, lengths: Sequence[int]) -> tuple[Setting, ...]:
        """Return plain decoding, and every method at these lengths, capped at its longest draft."""
        longest = self._fixed.engine.limits.longest_drafts
        drafting = (
            Setting(method, length)
            for method in self._fixed.engine.limits.drafters
            for length in sorted({min(length, longest.get(method, max(LENGTHS))) for length in lengths})
        )
        return (PLAIN, *drafting)


class WorkloadRunner:
    """Runs one workload with any setting: the prompts, seeds and numbers of tokens are the same each time."""

    def __init__(self, workload: Workload, model: LoadedModel, *, max_tokens: int, quick: bool) -> None:
        self.name = workload.name
        self.model = model
        self._sampling = workload.sampling
        prompts = workload.prompts(model.text, model.text.vocabulary_size)
        groups = [prompts] if workload.together else [[prompt] for prompt in prompts]
        stops = frozenset[int]() if workload.noise_tokens else model.text.stop_token_ids
        self.groups: Sequence[tuple[list[list[int]], int]] = [
            (group, self._natural_length(group, max_tokens, stops))
            for group in (groups[:QUICK_REQUESTS] if quick else groups)
        ]

    def _natural_length(self, group: list[list[int]], max_tokens: int, stops: frozenset[int]) -> int:
        """Return the number of tokens in the group's shortest answer under plain decoding."""
        run = self.model.side(PLAIN).run(group, max_tokens, speculation_of(PLAIN), stops, self._sampling)
        return min(len(tokens) for tokens in run.texts.values())

    def warm_up(self, setting: Setting) -> None:
        """Generate the beginning of the first answer."""
        prompts, tokens = self.groups[0]
        self.model.side(setting).run(
            prompts, min(tokens, WARM_UP_TOKENS), speculation_of(setting), sampling=self._sampling
        )

    def run(self, setting: Setting) -> WorkloadResult:
        """Answer all requests, one group after the other."""
        result, side = WorkloadResult(), self.model.side(setting)
        for prompts, tokens in self.groups:
            run = side.run(prompts, tokens, speculation_of(setting), sampling=self._sampling)
            result.tokens += run.tokens
            result.seconds += run.seconds
            result.texts += run.texts.values()
            for entry in (method for statistics in run.statistics for method in statistics.by_method):
                result.steps[entry.method] = result.steps.get(entry.method, 0) + entry.steps
        return result


def speculation_of(setting: Setting) -> SpeculationRequest:
    """Return the setting as a client would request it."""
    return SpeculationRequest(method=setting.method, num_draft_tokens=setting.drafts or None)


Answers = Mapping[Setting, Sequence[WorkloadResult]]
"""Answers by setting, one for each round."""

TEN_SUMMARY = "the governor over ten mixed workloads of the embedded models, against the best of all fixed settings"


def run_governor_ten(bench: Bench) -> CaseResult:
    """Measure, then summarise; the medians of all settings are in the document's notes."""
    quick = bench.tokens < QUICK_BELOW_TOKENS
    models = {name: LoadedModel(name) for name in DRAFTERS}
    max_tokens = bench.tokens if quick else LONGEST_ANSWER_TOKENS
    turns = [
        WorkloadRunner(workload, models[workload.model], max_tokens=max_tokens, quick=quick) for workload in WORKLOADS
    ]
    fixed = [turn.model.settings(QUICK_LENGTHS if quick else FIXED_LENGTHS) for turn in turns]
    for current, settings in zip(turns, fixed, strict=True):
        for setting in settings:
            bench.progress(f"{current.name}: warm-up of {setting.name}")
            current.warm_up(setting)
    sweep_results = run_rounds(turns, fixed, bench.rounds, lambda message: bench.progress(f"sweep: {message}"))
    sweeps = [rates_of(answers) for answers in sweep_results]
    single = best_single(sweeps)
    # The governor does not warm up: its first steps count.
    competitors = [
        [*dict.fromkeys((best_single([sweep]), effective_setting(single, sweep))), GOVERNOR] for sweep in sweeps
    ]
    answers = run_rounds(turns, competitors, TURNS_PER_ROUND * bench.rounds, bench.progress)
    for model in models.values():
        model.close()
    rates = [
        Rates(turn.name, sweep, rates_of(results)) for turn, sweep, results in zip(turns, sweeps, answers, strict=True)
    ]
    verdict = summarise(rates)
    checks = (
        Check(f"worst: {verdict.worst_name} / best fixed", verdict.worst, MIN_WORST_RATIO),
        Check("geometric mean / best fixed", verdict.mean, MIN_MEAN_RATIO),
        Check(f"geometric mean / {verdict.single.name}", verdict.mean_over_single, MIN_MEAN_OVER_SINGLE),
    )
    combined = list(zip(rates, sweep_results, answers, strict=True))
    series = [measured for rate, _, results in combined for measured in series_of(rate, results[GOVERNOR])]
    notes = {key: value for rate, *results in combined for key, value in notes_of(rate, *results)}
    return CaseResult("governor_ten", TEN_SUMMARY, TOKENS_PER_SECOND, tuple(series), checks, notes)


def run_rounds(
    turns: Sequence[WorkloadRunner], settings: Sequence[Sequence[Setting]], rounds: int, progress: Callable[[str], None]
) -> list[Answers]:
    """Run the rounds: in each, every workload takes one turn with each of its settings."""
    results: list[dict[Setting, list[WorkloadResult]]] = [{} for _ in turns]
    for number in range(rounds):
        for turn, workload_settings, answers in zip(turns, settings, results, strict=True):
            progress(f"{turn.name}: round {number + 1} of {rounds}")
            for setting in rotated(workload_settings, number * len(workload_settings) // rounds):
                answers.setdefault(setting, []).append(turn.run(setting))
    return [*results]


def rotated(settings: Sequence[Setting], by: int) -> list[Setting]:
    """Return the settings rotated by `by` places."""
    return [*settings[by:], *settings[:by]]


def rates_of(answers: Answers) -> RatesBySetting:
    """Return the tokens per second of each answer."""
    return {setting: tuple(result.tokens_per_second for result in results) for setting, results in answers.items()}


def series_of(rates: Rates, governor: Sequence[WorkloadResult]) -> tuple[Series, Series]:
    """Return the series of the best fixed setting and of the governor."""
    best, governor_rates = rates.rounds[rates.best], rates.rounds[GOVERNOR]
    notes = (
        {"of the best": ours / theirs, **result.shares()}
        for ours, theirs, result in zip(governor_rates, best, governor, strict=True)
    )
    return (
        Series(f"{rates.name}: {rates.best.name}", tuple(Sample(value) for value in best)),
        Series(f"{rates.name}: governor", tuple(map(Sample, governor_rates, notes))),
    )


def notes_of(rates: Rates, sweep_results: Answers, answers: Answers) -> list[tuple[str, float]]:
    """Return all medians, the ratios, and the share of turns with the texts of plain decoding (rounding may differ)."""
    expected = sweep_results[PLAIN][0].texts
    same = [
        result.texts == expected
        for by_setting in (sweep_results, answers)
        for results in by_setting.values()
        for result in results
    ]
    best, governor_rates = rates.rounds[rates.best], rates.rounds[GOVERNOR]
    return [
        *((f"{rates.name} / {setting.name}", median(values)) for setting, values in rates.sweep.items()),
        (f"{rates.name} / governor", median(governor_rates)),
        (f"{rates.name} / of the best", rates.ratio),
        (f"{rates.name} / of the best, first round", governor_rates[0] / best[0]),
        (f"{rates.name} / tokens", float(sweep_results[PLAIN][0].tokens)),
        (f"{rates.name} / same text", sum(same) / len(same)),
    ]


GOVERNOR_CASES = (Case("governor_ten", TEN_SUMMARY, run_governor_ten),)
