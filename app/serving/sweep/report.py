"""Evaluation of a measurement: all figures, each cell's verdict, the recommendation and its changes. Pure.

Page, table, plot, history and "apply" all use this report and compute nothing themselves. All figures of a cell come
from paired rounds: a setting's speed is divided by the plain speed of the same round. `ratio` is the median of these
quotients, which range from `low` to `high`; a speed is the ratio times the median plain speed, so that the speeds in a
table agree with its ratios. A difference counts if it exceeds the noise and no round contradicts it; else it is a tie.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import msgspec

from app.core.unit import ModelSpecification
from app.models.drafters.methods import DRAFT_METHODS, NGRAM, TEXT_METHODS
from app.serving.sweep.grid import GOVERNOR, MAIN, PLAIN, Setting

Standing = Literal["plain", "faster", "slower", "tie"]
Verdict = Literal["faster", "plain", "tie", "none"]
SMALLEST_NOISE = (0.25, 0.10, 0.05)
"""Lower bound of the noise, as a share, with one, two, and three or more rounds."""
NOISE_PER_DEVIATION = 2.0
STEADY = 0.10
"""Largest deviation of a plain round from the median, as a share; above it, something else kept the machine busy."""
ROUNDS_WITH_OUTLIERS = 8
"""Smallest number of rounds at which the slowest and the fastest are dropped as outliers."""
UNSET = {"drafts": None, "methods": None, "num_draft_tokens": None}


@dataclass(frozen=True, slots=True)
class Figures:
    """One setting of a cell; speeds are tokens per second of all rows together, over `rounds` paired rounds."""

    name: str
    method: str
    num_draft_tokens: int
    used: tuple[str, ...]
    """Methods that drafted, the most used first."""
    rounds: int
    tokens_per_second: float
    slowest: float
    fastest: float
    ratio: float
    low: float
    high: float
    standing: Standing
    acceptance: float | None
    tokens_per_cycle: float | None

    @property
    def setting(self) -> Setting:
        return Setting(self.method, self.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class CellReport:
    """The result of a cell. `best` is the name of the recommended setting; empty if there is none."""

    rows: int
    context: int
    verdict: Verdict
    best: str
    noise: float
    """Smallest difference that counts, as a share; in a tie, at least the largest observed difference."""
    deviation: float
    """Largest deviation of a plain round from the median of all plain rounds, as a share."""
    rounds: int
    settings: tuple[Figures, ...]

    @property
    def is_main(self) -> bool:
        """Whether this is the main cell: one request with a short prompt."""
        return (self.rows, self.context) == (MAIN.rows, MAIN.context)

    def find(self, name: str) -> Figures | None:
        return next((figures for figures in self.settings if figures.name == name), None)


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reason to measure again: `one_round`, `unsteady` (`amount` is a share) or `disturbed` (a number of turns)."""

    kind: Literal["one_round", "unsteady", "disturbed"]
    amount: float


@dataclass(frozen=True, slots=True)
class Report:
    """The whole evaluation. `choice` has the recommended settings; None if nothing should be changed."""

    cells: tuple[CellReport, ...]
    choice: Mapping[str, Any] | None
    doubts: tuple[Doubt, ...]
    text: str
    """Summary in one line."""

    @property
    def main_cell(self) -> CellReport | None:
        """The main cell, with one request; its verdict is shown as that of the model."""
        return next((cell for cell in self.cells if cell.is_main), None)


@dataclass(frozen=True, slots=True)
class Change:
    """A setting of the model with its old and new value; None is unset."""

    name: str
    old: Any
    new: Any


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended changes; none if `kept`, the setting in use, is as good within the noise."""

    changes: tuple[Change, ...] = ()
    kept: str = ""


def report_of(results: Mapping[str, Any]) -> Report:
    """Evaluate the output of `Sweep.results`; unreadable output of another version gives a report without cells."""
    try:
        unchecked = [_cell(cell) for cell in results["cells"] if _plain_values(cell)]
        cells = msgspec.convert(msgspec.to_builtins(unchecked), tuple[CellReport, ...])  # checks every value's type
        choice = _choice(cells, _drafters(results))
        doubts = tuple(_doubts(cells, int(results["options"].get("disturbed", 0))))
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        return Report((), None, (), "it was measured by another version")
    return Report(cells, choice, doubts, _text(cells, choice))


def report_object(results: Mapping[str, Any], current: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the report as plain JSON values; with `current`, also the advice and the changes that each setting would
    make: the setting in use makes none."""
    report = report_of(results)
    plain: dict[str, Any] = msgspec.to_builtins(report)
    if current is not None:
        plain["advice"] = msgspec.to_builtins(advice_of(report, _drafters(results), current))
        for cell in plain["cells"]:
            for figures in cell["settings"]:
                setting = Setting(figures["method"], figures["num_draft_tokens"])
                choice = choice_of(setting, _drafters(results), used=figures["used"], rows=cell["rows"])
                figures["changes"] = msgspec.to_builtins(changes_to(choice, current))
    return plain


def _drafters(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the drafter ids by method."""
    methods = results.get("methods")
    return (
        {method: drafter for method, drafter in methods.items() if isinstance(drafter, str)}
        if isinstance(methods, dict)
        else {}
    )


# --- figures ----------------------------------------------------------------------------------------------------


def _plain_values(cell: Mapping[str, Any]) -> Sequence[float]:
    return next((setting["values"] for setting in cell["settings"] if setting["method"] == PLAIN.method), ())


def _cell(cell: Mapping[str, Any]) -> CellReport:
    plain = _plain_values(cell)
    plain_median = median(plain)
    deviation = max(abs(value / plain_median - 1) for value in plain)
    settings = tuple(
        _figures(setting, plain, plain_median, deviation) for setting in cell["settings"] if setting["values"]
    )
    verdict, best = _verdict(settings, _noise(len(plain), deviation))
    differences = [figures.ratio - 1 for figures in settings if verdict == "tie" and figures.method != PLAIN.method]
    noise = max([_noise(len(plain), deviation), *differences])
    return CellReport(cell["rows"], cell["context"], verdict, best, noise, deviation, len(plain), settings)


def _noise(rounds: int, deviation: float) -> float:
    return max(SMALLEST_NOISE[min(rounds, len(SMALLEST_NOISE)) - 1], NOISE_PER_DEVIATION * deviation)


def _figures(measured: Mapping[str, Any], plain: Sequence[float], plain_median: float, deviation: float) -> Figures:
    used, tokens_per_cycle = measured["used"], measured["tokens_per_cycle"]
    is_plain = measured["method"] == PLAIN.method
    # the speedup of a cycle cannot exceed the tokens that it yields: anything above that is noise
    pairs = zip(measured["values"], [plain_median] * len(plain) if is_plain else plain, strict=False)
    ratios = sorted(min(value / base, tokens_per_cycle or value / base) for value, base in pairs)
    dropped = 1 if len(ratios) >= ROUNDS_WITH_OUTLIERS else 0
    ratio, low, high = median(ratios), ratios[dropped], ratios[-1 - dropped]
    standing: Standing = "plain" if is_plain else _standing(ratio, low, high, _noise(len(ratios), deviation))
    setting = Setting(measured["method"], measured["num_draft_tokens"])
    return Figures(
        name=setting.name,
        method=setting.method,
        num_draft_tokens=setting.drafts,
        used=(used,) if isinstance(used, str) and used else tuple(used),  # earlier versions wrote one name
        rounds=len(ratios),
        tokens_per_second=plain_median * ratio,
        slowest=plain_median * low,
        fastest=plain_median * high,
        ratio=ratio,
        low=low,
        high=high,
        standing=standing,
        acceptance=measured["acceptance"],
        tokens_per_cycle=tokens_per_cycle,
    )


def _standing(ratio: float, low: float, high: float, noise: float) -> Standing:
    if low > 1 and ratio >= 1 + noise:
        return "faster"
    return "slower" if high < 1 and ratio <= 1 / (1 + noise) else "tie"


def _verdict(settings: Sequence[Figures], noise: float) -> tuple[Verdict, str]:
    """Return verdict and best setting. The governor, which adapts, beats a fixed length that is not clearly better."""
    drafting = [figures for figures in settings if figures.method != PLAIN.method]
    faster = [figures for figures in drafting if figures.standing == "faster"]
    if faster:
        best = max(faster, key=lambda figures: figures.ratio)
        comparable = [
            figures
            for figures in faster
            if figures.method == GOVERNOR.method and figures.ratio * (1 + noise) >= best.ratio
        ]
        return "faster", (comparable or [best])[0].name
    if not drafting:
        return "none", ""
    return ("plain", PLAIN.name) if all(figures.standing == "slower" for figures in drafting) else ("tie", "")


# --- recommendation ----------------------------------------------------------------------------------------------


def _deciding_cells(cells: Iterable[CellReport]) -> list[CellReport]:
    """Return the cells that decide the choice, sorted by rows: those with short prompts where drafting was measured."""
    decisive = (cell for cell in cells if cell.context == MAIN.context and cell.verdict != "none")
    return sorted(decisive, key=lambda cell: cell.rows)


def _choice(cells: Sequence[CellReport], drafters: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the recommended settings, or None. If drafting pays for several requests, the draft length is left to the
    governor, because no single length suits all. `policy` is set only if cells with several requests decide it."""
    deciding_cells = _deciding_cells(cells)
    batches = {cell.verdict for cell in deciding_cells if cell.rows > 1}
    best = [figures for cell in deciding_cells if cell.verdict == "faster" and (figures := cell.find(cell.best))]
    if not best:
        main_cell = next((cell for cell in deciding_cells if cell.is_main), None)
        return choice_of(PLAIN, drafters) if main_cell is not None and main_cell.verdict == "plain" else None
    pays_for_several = any(cell.verdict == "faster" for cell in deciding_cells if cell.rows > 1)
    if any(figures.setting == GOVERNOR for figures in best):
        choice = choice_of(GOVERNOR, drafters, used={method for figures in best for method in figures.used})
    else:
        methods = list(dict.fromkeys(figures.method for figures in best))
        choice = _fixed(methods, None if pays_for_several else best[0].num_draft_tokens, drafters)
    if batches:
        choice |= {"policy": "auto"} if pays_for_several else {"policy": "single"} if batches == {"plain"} else {}
    return choice


def choice_of(
    setting: Setting, drafters: Mapping[str, str], *, used: Collection[str] = DRAFT_METHODS, rows: int = 1
) -> dict[str, Any]:
    """Return the model settings that reproduce a measured setting; `drafters`: drafter id by method.

    The governor gets the drafters of the methods that it `used`: any others would only take memory.
    """
    if setting == PLAIN:
        return {**UNSET, "policy": "off"}
    policy = {"policy": "auto"} if rows > 1 else {}
    if setting == GOVERNOR:
        return {**UNSET, "drafts": [drafter for method, drafter in drafters.items() if method in used], **policy}
    return _fixed([setting.method], setting.drafts or None, drafters) | policy


def _fixed(methods: list[str], length: int | None, drafters: Mapping[str, str]) -> dict[str, Any]:
    named = [drafters[method] for method in methods if method in drafters]
    choice = {"methods": methods, "num_draft_tokens": length, **({"drafts": named} if named else {})}
    return choice if NGRAM.name in methods else {**choice, "prompt_lookup_min": None, "prompt_lookup_max": None}


def drafting_of(given: Mapping[str, Any], unit: ModelSpecification | None) -> dict[str, Any]:
    """Return how a model drafts now, as input for `changes_to`: its settings, policy and planned drafters."""
    return {
        **given,
        "policy": unit.live.policy if unit is not None else "off",
        "planned": [drafter.id for drafter in unit.drafters] if unit is not None else [],
    }


def changes_to(choice: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return what `choice` would change in `current`, the result of `drafting_of`. If the policy is `off`, a choice
    without a policy sets it to `auto`."""
    target = dict(choice)
    if current["policy"] == "off" and target.get("policy") is None:
        target["policy"] = "auto"
    drafts = target.get("drafts")
    if drafts is not None and current.get("drafts") is None and set(drafts) == set(current.get("planned") or ()):
        del target["drafts"]
    return tuple(
        Change(name, current.get(name), new)
        for name, new in target.items()
        if _plain_value(new) != _plain_value(current.get(name))
    )


def _plain_value(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def advice_of(report: Report, drafters: Mapping[str, str], current: Mapping[str, Any]) -> Advice:
    """Return what to change in `current`."""
    if report.choice is None:
        return Advice()
    changes = changes_to(report.choice, current)
    main_cell = report.main_cell
    best = main_cell.find(main_cell.best) if main_cell is not None else None
    if not changes or main_cell is None or best is None or {change.name for change in changes} & {"policy"}:
        return Advice(changes)
    comparable = [
        figures.name
        for figures in main_cell.settings
        if figures.standing == best.standing
        and figures.ratio * (1 + main_cell.noise) >= best.ratio
        and not changes_to(choice_of(figures.setting, drafters, used=figures.used), current)
    ]
    return Advice(kept=comparable[0]) if comparable else Advice(changes)


def best_by_drafter(documents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[int, Figures]]:
    """Return the index of a document and the best fixed setting for one request in it, by method and drafter id ("" for
    n-grams). The first document that measured a drafter is used: figures of different measurements are not comparable.
    """
    best: dict[tuple[str, str], tuple[int, Figures]] = {}
    for index, results in enumerate(documents):
        main_cell, drafters = report_of(results).main_cell, _drafters(results)
        best_here: dict[tuple[str, str], Figures] = {}
        for setting in main_cell.settings if main_cell is not None else ():
            key = (setting.method, drafters.get(setting.method, ""))
            if setting.num_draft_tokens and (setting.method in TEXT_METHODS or key[1]):
                best_here[key] = max(best_here.get(key, setting), setting, key=lambda figures: figures.ratio)
        best = {key: (index, figures) for key, figures in best_here.items()} | best
    return best


def speedups(documents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Return the speedup of each drafter that is clearly faster or slower than plain decoding, by method and id."""
    best = best_by_drafter(documents)
    return {key: figures.ratio for key, (_, figures) in best.items() if figures.standing != "tie"}


# --- texts -------------------------------------------------------------------------------------------------------


def _doubts(cells: Sequence[CellReport], disturbed: int) -> Iterable[Doubt]:
    deviation = max((cell.deviation for cell in cells), default=0.0)
    if any(cell.rounds == 1 for cell in _deciding_cells(cells)):
        yield Doubt("one_round", 1)
    if round(deviation, 6) > STEADY:
        yield Doubt("unsteady", deviation)
    if disturbed:
        yield Doubt("disturbed", disturbed)


def _text(cells: Sequence[CellReport], choice: Mapping[str, Any] | None) -> str:
    deciding_cells = _deciding_cells(cells)
    if not deciding_cells:
        return "nothing to compare: no drafting was measured"
    summaries = [
        f"{cell_text(cell)} ({cell.rows} {'request' if cell.rows == 1 else 'requests'})" for cell in deciding_cells
    ]
    return "; ".join([*summaries, *([] if choice else ["change nothing"])])


def cell_text(cell: CellReport) -> str:
    """Return the verdict of a cell in one line."""
    return f"first impression: {_compared_text(cell)}" if cell.rounds == 1 else _compared_text(cell)


def _compared_text(cell: CellReport) -> str:
    best = cell.find(cell.best)
    if cell.verdict == "tie" or best is None:
        return f"no clear difference, ±{cell.noise:.0%}"
    if best.setting == PLAIN:
        return "no drafting is fastest"
    if best.setting == GOVERNOR:
        return f"governor{', mostly ' + best.used[0] if best.used else ''}: {best.ratio:.2f}x"
    return f"{best.method}, draft length {best.num_draft_tokens}: {best.ratio:.2f}x"
