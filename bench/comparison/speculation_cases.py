"""Cases about speculation itself: several rows, block drafts, rewinds at long context, and unpredictable text."""

from app.core.request import SpeculationRequest
from bench.comparison.caches_alone import RaggedRows
from bench.comparison.cases import TOKENS_PER_SECOND, Bench, Case
from bench.comparison.measure import CaseResult, Check, Contender, Sample, paired_ratio
from bench.comparison.ours import PLAIN, OurSide, Run, specification_of
from bench.comparison.scripted import BLOCK_SIZE, Script, open_scripted
from bench.comparison.workshop import PairFolders

SCRIPTED_ACCEPTANCE = 0.89
"""Acceptance that the script aims at; its random numbers give 0.86 per slot in the first rounds, on any machine."""
PROMISED_ACCEPTANCE = 0.85
LONG_CONTEXT, SHORT_CONTEXT = 8192, 512
REWIND_CYCLES = 100

DFLASH_SUMMARY = "a DFlash drafter of real size (2 layers, blocks of 8), drafts from a script, against plain"


def run_dflash_pair(bench: Bench) -> CaseResult:
    """Run one request. Plain decoding goes first in each round, because the script is made from its text."""
    script = Script(SCRIPTED_ACCEPTANCE)
    target = PairFolders(bench.workshop.attention_pair().target, None)
    ours = OurSide(target, open_unit=lambda unit: open_scripted(unit, script))
    drafting = SpeculationRequest(method="dflash", num_draft_tokens=BLOCK_SIZE - 1)

    def plain_turn(number: int) -> Sample:
        prompt = bench.workshop.prompt(number)
        run = ours.run([prompt], bench.tokens, PLAIN)
        script.record(prompt, next(iter(run.texts.values())))
        return Sample(run.tokens_per_second)

    def drafting_turn(number: int) -> Sample:
        run = ours.run([bench.workshop.prompt(number)], bench.tokens, drafting)
        return Sample(run.tokens_per_second, {**run.notes(), "acceptance per slot": acceptance_per_slot(run)})

    series = bench.measure(Contender("paceline, plain", plain_turn), Contender("paceline, dflash", drafting_turn))
    ours.close()
    dflash = series["paceline, dflash"]
    checks = (
        Check("dflash / plain", paired_ratio(dflash, series["paceline, plain"]), 2.5),
        Check("acceptance per slot", dflash.median_notes()["acceptance per slot"], PROMISED_ACCEPTANCE),
    )
    return CaseResult("dflash_pair", DFLASH_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), checks)


def acceptance_per_slot(run: Run) -> float:
    """Return accepted / judged drafts; judged are the accepted ones and the first rejected one of each cycle."""
    outcomes = [outcome for _, result in run.cycles for outcome in result.outcomes if outcome.drafted]
    accepted = sum(outcome.accepted for outcome in outcomes)
    judged = accepted + sum(outcome.accepted < outcome.drafted for outcome in outcomes)
    return accepted / judged if judged else 0.0


BATCHED_SUMMARY = "draft model for 4 rows at once on an attention pair, against plain decoding of the same rows"


def run_batched(bench: Bench) -> CaseResult:
    """Run four requests at once, policy auto: with a fixed draft length, with the governor's, and without drafts."""
    folders = bench.workshop.attention_pair()
    ours = OurSide(specification_of(folders, policy="auto"))

    def contender(name: str, speculation: SpeculationRequest) -> Contender:
        def turn(number: int) -> Sample:
            prompts = [bench.workshop.prompt(number, row) for row in range(4)]
            run = ours.run(prompts, bench.tokens, speculation)
            return Sample(run.tokens_per_second, run.notes())

        return Contender(name, turn)

    series = bench.measure(
        contender("4 rows, draft", bench.drafting),
        contender("4 rows, governor", SpeculationRequest(method="draft_model")),
        contender("4 rows, plain", PLAIN),
    )
    ours.close()
    plain = series["4 rows, plain"]
    checks = (
        Check("draft / plain", paired_ratio(series["4 rows, draft"], plain), 1.2),
        Check("governor / plain", paired_ratio(series["4 rows, governor"], plain), 1.2),
    )
    notes = {"epsilon": folders.epsilon, "calibrated acceptance": folders.acceptance}
    return CaseResult("batched_4", BATCHED_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), checks, notes)


REWIND_SUMMARY = "a ragged write and rewind of 4 rows, caches alone, at 8k against 0.5k of context"


def run_rewind_context(bench: Bench) -> CaseResult:
    """Measure the caches without attention, whose own cost grows with the context."""
    sizes = bench.workshop.sizes
    heads = max(1, sizes.heads // 3)
    long, short = (RaggedRows(size, layers=sizes.layers, heads=heads) for size in (LONG_CONTEXT, SHORT_CONTEXT))
    series = bench.measure(
        Contender("8k context", lambda _: long.turn(REWIND_CYCLES)),
        Contender("0.5k context", lambda _: short.turn(REWIND_CYCLES)),
    )
    ratio = paired_ratio(series["8k context"], series["0.5k context"])
    check = Check("8k / 0.5k", ratio, 1.15, "at most")
    return CaseResult("rewind_context", REWIND_SUMMARY, "ms", tuple(series.values()), (check,))


NOTHING_SUMMARY = "the governor with a draft model of which nothing is accepted, against plain"


def run_nothing_accepted(bench: Bench) -> CaseResult:
    """Run one request with a draft that is unrelated to the target."""
    ours = OurSide(bench.workshop.unrelated_pair())
    tokens, governed = bench.tokens * 2, SpeculationRequest(method="draft_model")
    prompt = bench.workshop.prompt
    series = bench.measure(
        Contender("paceline, governor", lambda number: ours.answer(prompt(number), tokens, governed)),
        Contender("paceline, plain", lambda number: ours.answer(prompt(number), tokens, PLAIN)),
    )
    ours.close()
    ratio = paired_ratio(series["paceline, governor"], series["paceline, plain"])
    check = Check("governor / plain", ratio, 0.97)
    return CaseResult("nothing_accepted", NOTHING_SUMMARY, TOKENS_PER_SECOND, tuple(series.values()), (check,))


SPECULATION_CASES = (
    Case("dflash_pair", DFLASH_SUMMARY, run_dflash_pair),
    Case("batched_4", BATCHED_SUMMARY, run_batched),
    Case("rewind_context", REWIND_SUMMARY, run_rewind_context),
    Case("nothing_accepted", NOTHING_SUMMARY, run_nothing_accepted),
)
