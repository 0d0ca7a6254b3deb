"""Cases that run inside this process, on one engine: plain decoding, the cost of a cycle, pairs of models, n-grams."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import mlx.core as mx

from app.core.request import SpeculationRequest
from bench.comparison.measure import (
    CaseResult,
    Check,
    Contender,
    Progress,
    Sample,
    Series,
    paired_ratio,
    take_turns,
)
from bench.comparison.ours import PLAIN, OurSide, Run
from bench.comparison.reference import generate_in_batch, generate_with_draft, load_reference, raw_cycle
from bench.comparison.workshop import PairFolders, Workshop

TOKENS_PER_SECOND = "tokens/s"
MINIMUM_ACCEPTANCE = 0.75


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings and tools of every case."""

    workshop: Workshop
    rounds: int
    tokens: int
    drafts: int
    """Draft length, in tokens, for cases in which both sides use the same."""
    progress: Progress = field(default=lambda _: None)

    def measure(self, *contenders: Contender) -> dict[str, Series]:
        """Let the contenders take turns."""
        return take_turns(contenders, self.rounds, self.progress)

    @property
    def drafting(self) -> SpeculationRequest:
        """Speculation with the reference's draft length."""
        return SpeculationRequest(method="draft_model", num_draft_tokens=self.drafts)


@dataclass(frozen=True, slots=True)
class Case:
    """One named case."""

    name: str
    summary: str
    run: Callable[[Bench], CaseResult]


def plain_case(rows: int) -> Case:
    """Make the case that compares plain decoding of `rows` rows at once with `BatchGenerator`."""
    name = f"plain_{rows}"
    summary = f"plain decoding of {rows} {'row' if rows == 1 else 'rows'} against mlx-lm's BatchGenerator"

    def run(bench: Bench) -> CaseResult:
        folders = bench.workshop.attention_pair()
        ours = OurSide(PairFolders(folders.target, None))
        model, _ = load_reference(folders.target)

        def prompts(number: int) -> list[list[int]]:
            return [bench.workshop.prompt(number, row) for row in range(rows)]

        series = bench.measure(
            Contender("paceline", lambda number: ours.decode(prompts(number), bench.tokens)),
            Contender("mlx-lm", lambda number: generate_in_batch(model, prompts(number), bench.tokens)),
        )
        ours.close()
        check = Check("plain / BatchGenerator", paired_ratio(series["paceline"], series["mlx-lm"]), 0.97)
        return CaseResult(name, summary, TOKENS_PER_SECOND, tuple(series.values()), (check,))

    return Case(name, summary, run)


CYCLE_SUMMARY = "a speculative cycle against its draft forwards and one verify forward, measured bare"


def run_cycle_overhead(bench: Bench) -> CaseResult:
    """Compare the milliseconds of a whole cycle, scheduler included, with those of the bare forwards."""
    folders = bench.workshop.attention_pair()
    assert folders.draft is not None  # noqa: S101 - this pair has a draft
    ours = OurSide(folders)
    target, _ = load_reference(folders.target)
    draft, _ = load_reference(folders.draft)

    def our_turn(number: int) -> Sample:
        run = ours.run([bench.workshop.prompt(number)], bench.tokens, bench.drafting)
        return Sample(median(full_cycles(run, bench.drafts)) * 1000, run.notes())

    def bare_turn(number: int) -> Sample:
        prompt = [*bench.workshop.prompt(number), *bench.workshop.prompt(number, 1, bench.tokens // 2)]
        return raw_cycle(target, draft, prompt, bench.drafts, repeats=max(5, bench.tokens // 4))

    series = bench.measure(Contender("paceline cycle", our_turn), Contender("bare forwards", bare_turn))
    ours.close()
    ratio = paired_ratio(series["paceline cycle"], series["bare forwards"])
    check = Check("cycle / bare forwards", ratio, 1.10, "at most")
    return CaseResult("cycle_overhead", CYCLE_SUMMARY, "ms", tuple(series.values()), (check,))


def full_cycles(run: Run, drafts: int) -> list[float]:
    """Return the wall seconds of the cycles that verified all drafts."""
    return [seconds for seconds, result in run.cycles if any(row.drafted == drafts for row in result.outcomes)]


ATTENTION_SUMMARY = "draft model on an attention pair against plain and against mlx-lm's stream_generate, same drafts"


def run_attention_pair(bench: Bench) -> CaseResult:
    """Run one request, timed from prompt to last token."""
    folders = bench.workshop.attention_pair()
    assert folders.draft is not None  # noqa: S101 - this pair has a draft
    ours = OurSide(folders)
    model, tokenizer = load_reference(folders.target)
    draft, _ = load_reference(folders.draft)
    prompt, tokens, drafts = bench.workshop.prompt, bench.tokens, bench.drafts
    series = bench.measure(
        Contender("paceline, draft", lambda number: ours.answer(prompt(number), tokens, bench.drafting)),
        Contender(
            "mlx-lm, draft",
            lambda number: generate_with_draft(model, tokenizer, draft, prompt(number), tokens, drafts),
        ),
        Contender("paceline, plain", lambda number: ours.answer(prompt(number), tokens, PLAIN)),
    )
    ours.close()
    drafting = series["paceline, draft"]
    checks = (
        Check("draft / plain", paired_ratio(drafting, series["paceline, plain"]), 1.6),
        Check("draft / mlx-lm with draft", paired_ratio(drafting, series["mlx-lm, draft"]), 1.03),
        acceptance_check(drafting),
    )
    notes = {"epsilon": folders.epsilon, "calibrated acceptance": folders.acceptance}
    return CaseResult("attention_pair", ATTENTION_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), checks, notes)


def acceptance_check(series: Series) -> Check:
    """Check that the pair agrees often enough for the other promises to count."""
    return Check("acceptance", series.median_notes().get("acceptance", 0.0), MINIMUM_ACCEPTANCE)


HYBRID_SUMMARY = "draft model on a hybrid pair (gated delta, snapshot rollback) against plain"


def run_hybrid_pair(bench: Bench) -> CaseResult:
    """Run one request over a qwen3_next pair; a cycle runs one target forward, wider by the carried-over tokens."""
    folders = bench.workshop.hybrid_pair()
    assert folders.draft is not None  # noqa: S101 - this pair has a draft
    ours = OurSide(folders)
    target, _ = load_reference(folders.target)
    draft, _ = load_reference(folders.draft)

    def drafting_turn(number: int) -> Sample:
        run = ours.run([bench.workshop.prompt(number)], bench.tokens, bench.drafting)
        cycle = median(full_cycles(run, bench.drafts) or [0.0]) * 1000
        return Sample(run.tokens_per_second, {**run.notes(), "cycle ms": cycle})

    series = bench.measure(
        Contender("paceline, draft", drafting_turn),
        Contender("paceline, plain", lambda number: ours.answer(bench.workshop.prompt(number), bench.tokens, PLAIN)),
    )
    bare = raw_cycle(target, draft, bench.workshop.prompt(0, 0, 64), bench.drafts, repeats=7)
    ours.close()
    drafting = series["paceline, draft"]
    checks = (
        Check("draft / plain", paired_ratio(drafting, series["paceline, plain"]), 1.4),
        acceptance_check(drafting),
    )
    notes = {"epsilon": folders.epsilon, "bare cycle ms": bare.value, **bare.notes}
    return CaseResult("hybrid_pair", HYBRID_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), checks, notes)


NGRAM_SUMMARY = "n-gram drafts on text that repeats, against plain"


def run_ngram(bench: Bench) -> CaseResult:
    """Run a target that walks around a ring of tokens: every n-gram has occurred before."""
    ours = OurSide(bench.workshop.copying_target())
    copying = SpeculationRequest(method="ngram")
    prompt, tokens = bench.workshop.copying_prompt, bench.tokens * 2
    series = bench.measure(
        Contender("paceline, ngram", lambda number: ours.answer(prompt(number), tokens, copying)),
        Contender("paceline, plain", lambda number: ours.answer(prompt(number), tokens, PLAIN)),
    )
    ours.close()
    mx.clear_cache()
    check = Check("ngram / plain", paired_ratio(series["paceline, ngram"], series["paceline, plain"]), 3.0)
    return CaseResult("ngram", NGRAM_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), (check,))


ENGINE_CASES = (
    plain_case(1),
    plain_case(4),
    plain_case(8),
    Case("cycle_overhead", CYCLE_SUMMARY, run_cycle_overhead),
    Case("attention_pair", ATTENTION_SUMMARY, run_attention_pair),
    Case("hybrid_pair", HYBRID_SUMMARY, run_hybrid_pair),
    Case("ngram", NGRAM_SUMMARY, run_ngram),
)
