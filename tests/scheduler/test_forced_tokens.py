"""What a grammar forces is drafted for nothing: on top of what is asked for, sure to be right, to nobody's merit."""

from collections.abc import Sequence

import pytest

from app.core.step import DecodeRow
from tests.scheduler.scripted import Loop, ScriptedEngine, build, check_against_naive, some_request

LENGTH = 12


def held(tokens: Sequence[int]) -> int:
    """In every 8 tokens behind the prompt, the first 5 are forced."""
    return max(0, 5 - (len(tokens) - LENGTH) % 8)


def engine(*, right: int, cost: float = 0.0) -> ScriptedEngine:
    """A drafter whose first `right` drafts are accepted; a forward is dearer by `cost` plain steps for each draft."""
    return ScriptedEngine(
        accepts=lambda drafts: min(drafts, right), forced=held, seconds=lambda width: 0.01 * (1 + cost * (width - 1))
    )


def known(row: DecodeRow) -> int:
    """How many of its next tokens were forced when it was planned."""
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
    """A drafter that is right as often as another one is asked as often, grammar or not."""
    shares = []
    for forced in (held, lambda _: 0):
        each = engine(right=0, cost=0.3)
        each.forced = forced
        rows = [row for row in ask(build(engine=each), method="draft_model")[-60:] if not known(row)]
        shares.append(sum(row.num_draft_tokens > 0 for row in rows) / len(rows))
    assert shares[0] <= shares[1] + 0.1


def test_statistics_count_forced_drafts_as_drafts() -> None:
    loop = build(engine=engine(right=0))
    ask(loop, method="draft_model", num_draft_tokens=1)
    [drafted] = [each for each in loop.end("a").statistics.by_method if each.method == "draft_model"]
    assert drafted.accepted > 200
