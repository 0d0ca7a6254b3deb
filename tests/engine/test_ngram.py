"""The n-gram drafter drafts what a naive search finds, and searches earlier requests only if asked to."""

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import ModelUnavailable
from app.core.reason import DRAFTER_READS, NO_REASON, Reason
from app.core.request import Request
from app.core.step import DecodeRow, Offer
from app.core.unit import ModelSpecification
from app.engine.drafters.ngram import ACROSS_TOKENS, END, EXTEND_TOKENS, MAX_MATCHES, OWNERS, Ngram, Text
from app.engine.drafters.registry import open_drafters
from app.engine.loaded_unit import LoadedUnit
from tests.tiny import tiny_model

Texts = Sequence[Sequence[int]]


def naive_places(texts: Texts, known: Sequence[int], shortest: int, longest: int) -> list[tuple[int, int]]:
    """Return (text, place) after each occurrence of the longest suffix of `known` that any text continues. Only the
    last `MAX_MATCHES` occurrences of the last `shortest` tokens are considered."""
    ends = [(number, end) for number, text in enumerate(texts) for end in range(shortest, len(text) + 1)]
    context = list(known[-shortest:])
    latest = [(number, end) for number, end in ends if list(texts[number][end - shortest : end]) == context]
    going_on = [(number, end) for number, end in latest[-MAX_MATCHES:] if end < len(texts[number])]
    for size in range(min(longest, len(known)), shortest - 1, -1):
        places = [
            (number, end)
            for number, end in going_on
            if end >= size and list(texts[number][end - size : end]) == list(known[-size:])
        ]
        if places:
            return places
    return []


def naive_continuation(texts: Texts, known: Sequence[int], limit: int, shortest: int, longest: int) -> list[int]:
    """Draft the most frequent next token of the matches (the latest on ties), then go on from those that have it."""
    drafts: list[int] = []
    places = naive_places(texts, known, shortest, longest)
    while places and len(drafts) < limit:
        followers = [texts[number][place] for number, place in places]
        most = max(followers.count(token) for token in followers)
        drafts.append(next(token for token in reversed(followers) if followers.count(token) == most))
        stay = [(number, place + 1) for number, place in places if texts[number][place] == drafts[-1]]
        places = [(number, place) for number, place in stay if place < len(texts[number])]
        places = places or naive_places(texts, [*known, *drafts], shortest, longest)
    return drafts


def row(name: str, tokens: Sequence[int], drafts: int = 6) -> DecodeRow:
    return DecodeRow(name, tokens, 1, len(tokens) - 1, 50, method="ngram", num_draft_tokens=drafts)


def start(drafter: Ngram, name: str, owner: str = "") -> None:
    drafter.admit(Request(id=name, owner=owner, prompt_tokens=(), max_tokens=1))


def drafts_of(drafter: Ngram, name: str, tokens: Sequence[int], drafts: int = 6) -> list[int]:
    if name not in drafter._texts:
        start(drafter, name)
    proposal = drafter.propose([row(name, tokens, drafts)], [])
    return proposal.tokens[0].tolist()  # type: ignore[return-value]


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
    drafter = Ngram(shortest, shortest + more)
    for length in range(1, len(text) + 1, step):
        drafts = drafts_of(drafter, "a", text[:length])
        assert drafts == naive_continuation([text[:length]], text[:length], 6, shortest, shortest + more)


@settings(deadline=None, max_examples=200)
@given(
    texts=st.lists(few_tokens(3, 30), min_size=1, max_size=5),
    known=few_tokens(3, 20),
    shortest=st.integers(1, 3),
    more=st.integers(0, 5),
)
def test_a_search_through_several_texts_never_reaches_from_one_into_the_next(
    texts: list[list[int]], known: list[int], shortest: int, more: int
) -> None:
    whole = Text(shortest)
    for text in texts:
        whole.extend([*text, END])
    continuation = whole.continuation(known, 5, shortest + more)
    assert list(continuation.tokens) == naive_continuation(texts, known, 5, shortest, shortest + more)


def test_the_most_frequent_continuation_wins_over_the_latest() -> None:
    assert drafts_of(Ngram(), "a", [1, 2, 3, 0, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2], drafts=1) == [3]
    assert drafts_of(Ngram(), "a", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2], drafts=1) == [4], "the latest on ties"


def test_an_offer_knows_what_was_just_said_and_how_much_of_it_matches() -> None:
    drafter = Ngram()
    start(drafter, "a")
    tokens = [5, 1, 2, 3, 4, 6, 5, 1]
    assert drafter.offer("a", tokens, (2,), 3) == Offer((3, 4, 6), 3)
    assert drafter.offer("a", tokens, (2, 3), 2) == Offer((4, 6), 4)
    assert drafter.offer("a", tokens, (9,), 3) == Offer()
    assert drafter.offer("a", [*tokens, 2], (), 1) == Offer((3,), 3), "nothing of it was kept"


def test_of_a_request_that_it_does_not_follow_it_can_tell_nothing() -> None:
    assert Ngram().offer("a", [1, 2, 3, 1, 2], (), 3) is None


def test_a_long_prompt_is_indexed_in_parts_and_then_drafts_as_if_it_had_been_indexed_at_once() -> None:
    drafter = Ngram()
    tokens = [*range(2 * EXTEND_TOKENS + 100), 7, 8]
    start(drafter, "a")
    for part in (1, 2):
        proposal = drafter.propose([row("a", tokens)], [])
        assert (proposal.counts, proposal.reasons) == ((0,), (DRAFTER_READS,))
        assert len(drafter._texts["a"][1].tokens) == part * EXTEND_TOKENS
    assert drafts_of(drafter, "a", tokens) == [9, 10, 11, 12, 13, 14]


def test_two_rows_never_see_each_other() -> None:
    drafter = Ngram()
    assert drafts_of(drafter, "a", [1, 2, 3, 4, 1, 2]) == [3, 4, 1, 2, 3, 4]
    assert drafts_of(drafter, "b", [9, 1, 2]) == []


def finish(drafter: Ngram, name: str, tokens: list[int], owner: str = "") -> None:
    start(drafter, name, owner)
    drafter.offer(name, tokens, (), 1)
    drafter.release(name)


def test_earlier_requests_are_forgotten_unless_it_was_asked_for() -> None:
    drafter = Ngram()
    finish(drafter, "a", [1, 2, 3, 4])
    assert drafts_of(drafter, "b", [9, 1, 2]) == []


def test_across_requests_an_earlier_text_drafts_where_its_match_is_longer() -> None:
    drafter = Ngram(across_tokens=ACROSS_TOKENS)
    finish(drafter, "a", [5, 1, 2, 3, 4])
    assert drafts_of(drafter, "b", [9, 1, 2]) == [3, 4]
    assert drafts_of(drafter, "c", [1, 2, 8, 0, 1, 2], drafts=1) == [8], "its own text comes first on ties"
    assert drafts_of(drafter, "d", [1, 2, 8, 5, 1, 2], drafts=1) == [3]


def test_nobody_drafts_from_the_earlier_requests_of_another_owner() -> None:
    drafter = Ngram(across_tokens=ACROSS_TOKENS)
    finish(drafter, "a", [5, 1, 2, 3, 4], owner="alice")
    for name, owner in (("b", "bob"), ("c", "alice")):
        start(drafter, name, owner)
    assert drafts_of(drafter, "b", [9, 1, 2]) == []
    assert drafts_of(drafter, "c", [9, 1, 2]) == [3, 4]


def test_the_owners_that_asked_longest_ago_are_forgotten() -> None:
    drafter = Ngram(across_tokens=ACROSS_TOKENS)
    for number in range(OWNERS):
        finish(drafter, str(number), [1, 2, 3], owner=str(number))
    finish(drafter, "again", [4, 5, 6], owner="0")
    finish(drafter, "new", [1, 2, 3], owner="new")
    assert set(drafter._earlier) == {"0", "new", *map(str, range(2, OWNERS))}


def test_the_oldest_requests_leave_when_the_index_is_full() -> None:
    drafter = Ngram(across_tokens=20)
    for first in range(0, 400, 10):
        finish(drafter, str(first), list(range(first, first + 5)))
        assert len(drafter._earlier[""].tokens) <= 20
        assert drafts_of(drafter, f"x{first}", [first, first + 1], drafts=1) == [first + 2], "the latest is there"
    assert drafts_of(drafter, "x", [0, 1]) == []


def test_of_a_very_long_text_the_end_is_kept() -> None:
    drafter = Ngram(across_tokens=20)
    finish(drafter, "a", list(range(100)))
    assert drafts_of(drafter, "b", [95, 96], drafts=2) == [97, 98]
    assert drafts_of(drafter, "c", [5, 6]) == []


def test_rows_with_and_without_a_match_share_one_rectangle() -> None:
    drafter = Ngram()
    for name in "abc":
        start(drafter, name)
    proposal = drafter.propose([row("a", [1, 2, 3, 1, 2], 3), row("b", [1, 2, 3]), row("c", [4, 4, 4], 2)], [])
    assert mx.array_equal(proposal.tokens, mx.array([[3, 1, 2], [0, 0, 0], [4, 4, 0]]))
    assert proposal.counts == (3, 0, 2)
    assert proposal.reasons == (NO_REASON, Reason("no_match"), NO_REASON)


def test_bounds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ModelUnavailable, match="between 1 and 4"):
        Ngram(shortest=5, longest=4)


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
    assert "between 1 and 4" in str(open_drafters(unit_with(5, 4)).unavailable["ngram"])


def unit_with(shortest: int | None, longest: int | None) -> LoadedUnit:
    spec = ModelSpecification(id="a", path="", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    return LoadedUnit(spec, tiny_model("qwen3"), {}, weights_bytes=0, max_context_tokens=64, vocabulary_size=97)
