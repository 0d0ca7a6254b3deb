"""The n-gram drafter says what the plainest search through the text says, and earlier requests only when it is told."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.messages import ModelSpecification
from app.core.request import Request
from app.core.step import DecodeRow
from app.engine.drafters import Outcome
from app.engine.drafters.ngram import OWNERS, Ngram
from app.engine.drafters.registry import open_drafters
from app.engine.drafters.suffixes import Suffixes
from app.engine.unit import LoadedUnit
from tests.tiny import tiny_model


def naive_next(texts: Sequence[Sequence[int]], known: Sequence[int], shortest: int, longest: int) -> int | None:
    """The most frequent token behind the longest end of `known` that any text goes on from; the latest on ties."""
    for size in range(min(longest, len(known)), shortest - 1, -1):
        context = list(known[-size:])
        followers = [
            text[end] for text in texts for end in range(size, len(text)) if list(text[end - size : end]) == context
        ]
        if followers:
            most = max(followers.count(token) for token in followers)
            return next(token for token in reversed(followers) if followers.count(token) == most)
    return None


def naive_continuation(
    texts: Sequence[Sequence[int]], known: Sequence[int], limit: int, shortest: int, longest: int
) -> list[int]:
    drafts: list[int] = []
    while len(drafts) < limit:
        token = naive_next(texts, [*known, *drafts], shortest, longest)
        if token is None:
            break
        drafts.append(token)
    return drafts


def row(name: str, tokens: Sequence[int], drafts: int = 6) -> DecodeRow:
    return DecodeRow(name, tokens, 1, len(tokens) - 1, 50, method="ngram", num_draft_tokens=drafts)


def drafts_of(drafter: Ngram, name: str, tokens: Sequence[int], drafts: int = 6) -> list[int]:
    proposal = drafter.propose([row(name, tokens, drafts)], [])
    return [] if proposal.tokens is None else proposal.tokens[0].tolist()  # type: ignore[return-value]


def few_tokens(alphabet: int, longest: int = 60) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=longest)


@settings(deadline=None, max_examples=300)
@given(
    text=st.one_of(few_tokens(1), few_tokens(2), few_tokens(3), few_tokens(8)),
    shortest=st.integers(1, 3),
    more=st.integers(0, 5),
    step=st.integers(1, 7),
)
def test_it_says_what_the_plain_search_says_while_the_text_grows(
    text: list[int], shortest: int, more: int, step: int
) -> None:
    drafter = Ngram(prompt_lookup_min=shortest, prompt_lookup_max=shortest + more)
    for length in range(1, len(text) + 1, step):
        told = drafts_of(drafter, "a", text[:length])
        assert told == naive_continuation([text[:length]], text[:length], 6, shortest, shortest + more)


@settings(deadline=None, max_examples=200)
@given(
    texts=st.lists(few_tokens(3, 30), min_size=1, max_size=5),
    known=few_tokens(3, 20),
    shortest=st.integers(1, 3),
    more=st.integers(0, 5),
)
def test_an_index_over_several_texts_equals_the_search_through_all(
    texts: list[list[int]], known: list[int], shortest: int, more: int
) -> None:
    index = Suffixes(shortest=shortest, longest=shortest + more)
    for text in texts:
        index.begin()
        index.extend(text)
    told = index.continuation(index.match(known), 5)
    assert told == naive_continuation(texts, known, 5, shortest, shortest + more)


def test_the_most_frequent_continuation_wins_over_the_latest() -> None:
    assert drafts_of(Ngram(), "a", [1, 2, 3, 0, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], drafts=1) == [3]
    assert drafts_of(Ngram(), "a", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], drafts=1) == [4], "the latest on ties"


def test_a_long_run_of_one_token_costs_no_more_per_token_than_any_text() -> None:
    index = Suffixes(shortest=2, longest=8)
    index.extend([7] * 5000)
    assert index.continuation(index.end, 3) == [7, 7, 7]
    counted = [len(counts) for counts in index._counts if counts]
    assert len(counted) <= 8, "longer contexts than `longest` are not counted"


def test_two_rows_never_see_each_other() -> None:
    drafter = Ngram()
    assert drafts_of(drafter, "a", [1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2, 3, 4]
    assert drafts_of(drafter, "b", [9, 1, 2]) == []


def finish(drafter: Ngram, name: str, tokens: list[int], owner: str = "") -> None:
    drafter.admit(Request(id=name, owner=owner, prompt_tokens=(), max_tokens=1))
    drafter.observe(Outcome((name,), tokens=(tokens,), starts=(0,), kept=(len(tokens),), drafted=(0,), accepted=(0,)))
    drafter.release(name)


def test_earlier_requests_are_forgotten_unless_it_was_asked_for() -> None:
    drafter = Ngram()
    finish(drafter, "a", [1, 2, 3, 4])
    assert drafts_of(drafter, "b", [9, 1, 2]) == []


def test_across_requests_an_earlier_text_drafts_where_its_match_is_longer() -> None:
    drafter = Ngram(across_requests=True)
    finish(drafter, "a", [5, 1, 2, 3, 4])
    assert drafts_of(drafter, "b", [9, 1, 2]) == [3, 4]
    assert drafts_of(drafter, "c", [1, 2, 8, 0, 1, 2], drafts=1) == [8], "its own text comes first on ties"
    assert drafts_of(drafter, "d", [1, 2, 8, 5, 1, 2], drafts=1) == [3]


def test_nobody_drafts_from_the_earlier_requests_of_another_owner() -> None:
    drafter = Ngram(across_requests=True)
    finish(drafter, "a", [5, 1, 2, 3, 4], owner="alice")
    for name, owner in (("b", "bob"), ("c", "alice")):
        drafter.admit(Request(id=name, owner=owner, prompt_tokens=(), max_tokens=1))
    assert drafts_of(drafter, "b", [9, 1, 2]) == []
    assert drafts_of(drafter, "c", [9, 1, 2]) == [3, 4]


def test_the_owners_that_asked_longest_ago_are_forgotten() -> None:
    drafter = Ngram(across_requests=True)
    for number in range(OWNERS):
        finish(drafter, str(number), [1, 2, 3], owner=str(number))
    finish(drafter, "again", [4, 5, 6], owner="0")
    finish(drafter, "new", [1, 2, 3], owner="new")
    assert set(drafter._earlier) == {"0", "new", *map(str, range(2, OWNERS))}


def test_the_oldest_requests_leave_when_the_index_is_full() -> None:
    drafter = Ngram(across_requests=True, across_tokens=20)
    for start in range(0, 400, 10):
        finish(drafter, str(start), list(range(start, start + 5)))
        assert sum(index.tokens for index in drafter._earlier[""]) <= 20
        assert drafts_of(drafter, "x", [start, start + 1], drafts=1) == [start + 2], "the latest is always there"
        drafter._own.clear()
    assert drafts_of(drafter, "x", [0, 1]) == []


def test_of_a_very_long_text_the_end_is_kept() -> None:
    drafter = Ngram(across_requests=True, across_tokens=20)
    finish(drafter, "a", list(range(100)))
    assert drafts_of(drafter, "b", [95, 96], drafts=2) == [97, 98]
    assert drafts_of(drafter, "c", [5, 6]) == []


def test_rows_with_and_without_a_match_share_one_rectangle() -> None:
    proposal = Ngram().propose([row("a", [1, 2, 3, 1, 2], 3), row("b", [1, 2, 3]), row("c", [4, 4, 4], 2)], [])
    assert proposal.tokens is not None
    assert mx.array_equal(proposal.tokens, mx.array([[3, 1, 2], [0, 0, 0], [4, 4, 0]]))
    assert proposal.counts == (3, 0, 2)
    assert proposal.reasons == ("", "no earlier text matches", "")


def test_bounds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 4"):
        Ngram(prompt_lookup_min=5, prompt_lookup_max=4)


@pytest.mark.parametrize(
    ("shortest", "longest", "text", "drafts"),
    [
        (None, None, [1, 2, 3, 9, 1, 2], [3]),
        (3, None, [1, 2, 3, 9, 1, 2], []),
        (3, None, [0, 1, 2, 3, 9, 0, 1, 2], [3]),
        (None, 1, [1, 2, 3, 9, 2], [3]),
        (1, 1, [1, 2, 3, 9, 2, 4, 5, 2, 4, 1, 2], [4]),
        (40, None, [*range(41), *range(40)], [40]),
    ],
)
def test_the_bounds_that_were_chosen_for_a_model_reach_its_drafter(
    shortest: int | None, longest: int | None, text: list[int], drafts: list[int]
) -> None:
    drafter = open_drafters(unit_with(shortest, longest)).available["ngram"]
    assert isinstance(drafter, Ngram)
    assert drafts_of(drafter, "a", text, drafts=1) == drafts


def test_bounds_that_contradict_each_other_are_told() -> None:
    assert "between 1 and 4" in open_drafters(unit_with(5, 4)).unavailable["ngram"]


def unit_with(shortest: int | None, longest: int | None) -> LoadedUnit:
    spec = ModelSpecification(id="a", path="", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    return LoadedUnit(spec, tiny_model("qwen3"), {}, weights_bytes=0, max_context_tokens=64, vocabulary_size=97)
