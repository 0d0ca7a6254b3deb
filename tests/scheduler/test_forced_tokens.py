"""Tokens that a grammar forces are free extra drafts: always accepted, and no drafter gets the credit."""

from collections.abc import Sequence

import pytest

from app.core.request import Request
from app.core.step import DecodeRow, EngineLimits, StepCost
from app.models.draft_lengths import DRAFT_LENGTHS, LONGEST_DRAFT
from app.scheduler.estimates import DraftingRow, DraftObservation
from app.scheduler.governor import DraftChoice, Governor, StepObservation
from app.scheduler.scheduler import Scheduler
from tests.scheduler.scripted import Loop, ScriptedEngine, build, check_against_naive, some_request

LENGTH = 12


def held(tokens: Sequence[int]) -> int:
    """Return how many next tokens are forced: of every 8 tokens after the prompt, the first 5 are."""
    return max(0, 5 - (len(tokens) - LENGTH) % 8)


def engine(*, right: int, cost: float = 0.0) -> ScriptedEngine:
    """Return an engine that accepts the first `right` drafts; each draft adds `cost` plain steps to a forward."""
    return ScriptedEngine(
        accepts=lambda drafts: min(drafts, right), forced=held, seconds=lambda width: 0.01 * (1 + cost * (width - 1))
    )


def known(row: DecodeRow) -> int:
    """Return how many of the row's next tokens were forced when it was planned."""
    return held(row.tokens[: row.computed + 1])


def ask(loop: Loop, **wishes: object) -> list[DecodeRow]:
    request = some_request("a", prompt=LENGTH, max_tokens=400, **wishes)  # type: ignore[arg-type]
    loop.run(request)
    check_against_naive(loop, request)
    return loop.decode_rows("a")


def test_forced_tokens_come_on_top_of_the_drafts_that_are_asked_for() -> None:
    rows = ask(build(engine=engine(right=0)), method="draft_model", num_draft_tokens=2)
    assert [row.num_draft_tokens for row in rows[1:-3]] == [2 + known(row) for row in rows[1:-3]]


def test_who_asks_for_no_drafts_gets_none() -> None:
    assert not any(row.num_draft_tokens for row in ask(build(engine=engine(right=0)), method="off"))
    assert not any(row.num_draft_tokens for row in ask(build(engine=engine(right=0)), num_draft_tokens=0))


@pytest.mark.parametrize("method", ["auto", "draft_model"])
def test_the_governor_drafts_what_is_forced_though_the_drafter_is_never_right(method: str) -> None:
    rows = ask(build(engine=engine(right=0, cost=0.1)), method=method)[-40:]
    assert all(row.num_draft_tokens for row in rows if known(row))
    assert sum(row.num_draft_tokens > 0 for row in rows if not known(row)) < 5, "nothing speaks for it there"


def test_what_is_forced_says_nothing_of_a_drafter() -> None:
    """A drafter that is never right is not used more often because a grammar's forced drafts are accepted."""
    shares = []
    for forced in (held, lambda _: 0):
        forcing_engine = engine(right=0, cost=0.3)
        forcing_engine.forced = forced
        rows = [row for row in ask(build(engine=forcing_engine), method="draft_model")[-60:] if not known(row)]
        shares.append(sum(row.num_draft_tokens > 0 for row in rows) / len(rows))
    assert shares[0] <= shares[1] + 0.1


def test_what_is_forced_behind_the_drafts_says_nothing_of_a_drafter_either() -> None:
    shares = []
    for appended in (4, 0):
        forcing_engine = engine(right=0, cost=0.3)
        forcing_engine.forced, forcing_engine.appended = lambda _: 0, appended
        rows = ask(build(engine=forcing_engine), method="draft_model")[-40:]
        shares.append(sum(row.num_draft_tokens > 0 for row in rows) / len(rows))
    assert shares[0] <= shares[1] + 0.1


class Held:
    """The part of a constraint that the scheduler uses; it forces nothing."""

    def begin(self) -> "Held":
        return self

    def forced(self, output: Sequence[int]) -> tuple[()]:
        return ()


def test_a_grammar_is_begun_once_however_often_its_request_is_measured() -> None:
    class Counted(Held):
        begun = 0

        def begin(self) -> "Held":
            self.begun += 1
            return self

    counted, scheduler = Counted(), Scheduler(EngineLimits(max_context_tokens=64, max_rows=1))
    request = Request(id="a", prompt_tokens=(1, 2, 3), max_tokens=5, constraint=counted)
    sizes = [scheduler.expected_of(request)]
    scheduler.submit(request)
    assert [*sizes, scheduler.expected_of(request)] == [(8, 3)] * 2
    assert counted.begun == 1


def test_who_names_a_length_gets_all_that_is_forced_behind_it() -> None:
    rows = ask(build(), method="draft_model", constraint=Held(), num_draft_tokens=2)
    assert {row.max_draft_tokens for row in rows if row.remaining > LONGEST_DRAFT} == {LONGEST_DRAFT}
    assert all(row.max_draft_tokens < row.remaining for row in rows)


@pytest.mark.parametrize(("cost", "right", "most"), [(0.0, 3, 31), (0.2, 3, 31), (0.3, 3, 3), (0.2, 2, 3)])
def test_what_is_forced_widens_a_forward_as_far_as_that_pays(cost: float, right: int, most: int) -> None:
    """Three drafts cost nothing and yield up to four tokens per plain step, so one more pays if it costs less than a
    quarter of a plain step. A forced draft is accepted only if all three before it are."""
    measured = [StepCost("draft_model", 1, length, 0.01 * (1 + cost * max(0, length - 3))) for length in DRAFT_LENGTHS]
    governor, row = Governor([StepCost("off", 1, 0, 0.01), *measured]), DraftingRow("a")
    for _ in range(60):
        governor.observe(StepObservation(1, 4, 0.01, drafts=(DraftObservation("draft_model", 3, 3, right, row),)))
    assert governor.widest(1, [row], ("draft_model",), DraftChoice("draft_model", 3)) == most


def test_statistics_count_forced_drafts_as_drafts() -> None:
    loop = build(engine=engine(right=0))
    ask(loop, method="draft_model", num_draft_tokens=1)
    [drafted] = [method for method in loop.end("a").statistics.by_method if method.method == "draft_model"]
    assert drafted.accepted > 200
