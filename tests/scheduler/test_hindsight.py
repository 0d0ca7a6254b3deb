"""What an offer would have been worth is known without trying it."""

from app.core.step import Offer
from app.scheduler.estimates import Drafting
from app.scheduler.sequence import Hindsight

ROW = Drafting("r", 100)


def observations(hindsight: Hindsight, emitted: tuple[int, ...], *offered: int) -> list[tuple[int, int, int]]:
    """(first, asked, accepted) of each observation."""
    offers = {"ngram": Offer(offered, 4 if offered else 0)}
    return [
        (observation.first, observation.asked, observation.accepted)
        for observation in hindsight.look_back(emitted, offers, ROW)
    ]


def test_an_offer_is_followed_to_its_first_wrong_token() -> None:
    hindsight = Hindsight()
    assert observations(hindsight, (), 1, 2, 3, 4) == [], "the prompt was read, nothing was said"
    assert observations(hindsight, (1,)) == [(0, 1, 1)]
    assert observations(hindsight, (2, 9)) == [(1, 2, 1)], "right, then wrong"
    assert observations(hindsight, (3,)) == []


def test_an_offer_ends_where_it_has_no_more_tokens() -> None:
    hindsight = Hindsight()
    observations(hindsight, (), 1, 2)
    assert observations(hindsight, (1, 2, 3)) == [(0, 2, 2)], "what comes behind it says nothing about it"
    assert observations(hindsight, (4,)) == []


def test_every_step_brings_an_offer_and_all_are_followed() -> None:
    hindsight = Hindsight()
    observations(hindsight, (), 1, 2, 3)
    assert observations(hindsight, (1,), 2, 8) == [(0, 1, 1)]
    assert observations(hindsight, (2,), 3) == [(1, 1, 1), (0, 1, 1)]
    assert observations(hindsight, (3,)) == [(2, 1, 1), (1, 1, 0), (0, 1, 1)]
    assert observations(hindsight, (4,)) == []


def test_the_newest_offer_is_what_may_be_drafted_now() -> None:
    hindsight = Hindsight()
    hindsight.look_back((), {"ngram": Offer((5, 6), 3)}, ROW)
    assert hindsight.offered == {"ngram": Offer((5, 6), 3)}
    (seen,) = hindsight.look_back((5,), {"ngram": Offer()}, ROW)
    assert (seen.method, seen.match, seen.row) == ("ngram", 2, ROW), "3 tokens matched: a short match"
    assert hindsight.offered == {"ngram": Offer()}


def test_the_pieces_of_a_prompt_bring_one_offer() -> None:
    hindsight = Hindsight()
    observations(hindsight, (), 1, 2)
    assert observations(hindsight, (), 1, 2) == []
    assert observations(hindsight, (1,)) == [(0, 1, 1)]
