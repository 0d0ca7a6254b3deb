"""What would have been accepted of a drafter that tells its drafts for nothing: they wait for what the target says."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.core.step import Offer
from app.scheduler.estimates import Drafting, DraftObservation, Kind


class _Followed(NamedTuple):
    """An offer of which the first `right` tokens came true."""

    kind: Kind
    tokens: tuple[int, ...]
    right: int = 0


class Hindsight:
    """Of one request: every offer is followed to its first wrong token or its end."""

    def __init__(self) -> None:
        self.offered: Mapping[str, Offer] = {}
        """The newest ones."""
        self._followed: list[_Followed] = []

    def look_back(self, emitted: Sequence[int], offers: Mapping[str, Offer], row: Drafting) -> list[DraftObservation]:
        """What the emitted tokens tell about earlier offers; the new ones are followed from now on."""
        told, followed = [], []
        for kind, tokens, right in self._followed:
            pairs = list(zip(tokens[right:], emitted, strict=False))
            hits = next((place for place, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
            tried = min(hits + 1, len(pairs))
            if tried:
                told.append(DraftObservation(kind.method, tried, tried, hits, row, kind.match, right))
            if hits == tried and right + hits < len(tokens):
                followed.append(_Followed(kind, tokens, right + hits))
        self.offered = offers
        fresh = (_Followed(Kind.of(method, offer), offer.tokens) for method, offer in offers.items())
        if emitted or not followed:  # each piece of a prompt brings the same one again
            followed += [each for each in fresh if each.tokens]
        self._followed = followed
        return told
