"""Emitted tokens show what an offer would have been worth, without trying it."""

from app.core.step import Offer
from app.scheduler.estimates import DraftingRow
from app.scheduler.sequence import OfferTracker

ROW = DraftingRow("r", 100)


def observations(tracker: OfferTracker, emitted: tuple[int, ...], *offered: int) -> list[tuple[int, int, int]]:
    """Return (offset, requested, accepted) of each observation."""
    offers = {"ngram": Offer(offered, 4 if offered else 0)}
    return [
        (observation.offset, observation.requested, observation.accepted)
        for observation in tracker.update(emitted, offers, ROW)
    ]


def test_an_offer_is_followed_to_its_first_wrong_token() -> None:
    tracker = OfferTracker()
    assert observations(tracker, (), 1, 2, 3, 4) == [], "the prompt was read, nothing was said"
    assert observations(tracker, (1,)) == [(0, 1, 1)]
    assert observations(tracker, (2, 9)) == [(1, 2, 1)], "right, then wrong"
    assert observations(tracker, (3,)) == []


def test_an_offer_ends_where_it_has_no_more_tokens() -> None:
    tracker = OfferTracker()
    observations(tracker, (), 1, 2)
    assert observations(tracker, (1, 2, 3)) == [(0, 2, 2)], "what comes behind it says nothing about it"
    assert observations(tracker, (4,)) == []


def test_every_step_brings_an_offer_and_all_are_followed() -> None:
    tracker = OfferTracker()
    observations(tracker, (), 1, 2, 3)
    assert observations(tracker, (1,), 2, 8) == [(0, 1, 1)]
    assert observations(tracker, (2,), 3) == [(1, 1, 1), (0, 1, 1)]
    assert observations(tracker, (3,)) == [(2, 1, 1), (1, 1, 0), (0, 1, 1)]
    assert observations(tracker, (4,)) == []


def test_the_newest_offer_is_what_may_be_drafted_now() -> None:
    tracker = OfferTracker()
    tracker.update((), {"ngram": Offer((5, 6), 3)}, ROW)
    assert tracker.offered == {"ngram": Offer((5, 6), 3)}
    (seen,) = tracker.update((5,), {"ngram": Offer()}, ROW)
    assert (seen.method, seen.match, seen.row) == ("ngram", 2, ROW), "3 tokens matched: a short match"
    assert tracker.offered == {"ngram": Offer()}


def test_the_pieces_of_a_prompt_bring_one_offer() -> None:
    tracker = OfferTracker()
    observations(tracker, (), 1, 2)
    assert observations(tracker, (), 1, 2) == []
    assert observations(tracker, (1,)) == [(0, 1, 1)]
