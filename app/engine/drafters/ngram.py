"""Prompt lookup: proposes what followed the longest earlier match of the last tokens.

It needs no model and pays on copying, editing and code (after prompt lookup decoding, A. Saxena 2023, and vLLM's n-gram
proposer: the longest match wins). Of several continuations the most frequent one is taken, the latest on ties, and the
drafts before it belong to the context of the next (SuffixDecoding, arXiv 2411.04975).
"""

from collections.abc import Iterable, Sequence

from app.core.errors import ModelUnavailable
from app.core.reason import NO_REASON, Reason
from app.core.request import Request
from app.core.step import DecodeRow, Offer
from app.engine.drafters import Drafter, LoadedUnit, Proposal
from app.engine.runner import padded
from app.engine.sampling import SampledRow

SHORTEST_MATCH_TOKENS = 2
LONGEST_MATCH_TOKENS = 32
MOST_MATCHES = 32
"""Most matches of a context to consider, the latest ones."""
ACROSS_TOKENS = 32_768
OWNERS = 8
"""Most owners whose earlier requests are kept; the one idle longest is dropped."""
END = -1
"""Separator of texts, so that no match spans two of them."""


class Text:
    """A growing list of tokens, with the places after each context of `shortest` of them."""

    def __init__(self, shortest: int) -> None:
        self.tokens: list[int] = []
        self._shortest = shortest
        self._places: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._here().append(len(self.tokens))

    def cut(self, count: int) -> None:
        """Forget the last `count` tokens."""
        for _ in range(count):
            self._here().pop()
            self.tokens.pop()

    def _here(self) -> list[int]:
        """Return the places after the last tokens; a context of fewer than `shortest` is never looked up."""
        return self._places.setdefault(tuple(self.tokens[-self._shortest :]), [])

    def places_after(self, known: Sequence[int], longest: int) -> tuple[list[int], int]:
        """Return the places after the longest suffix of `known` that continues anywhere, latest first, and its length.
        The length is `shortest` to `longest` tokens, or 0 if there is none."""
        best: list[int] = []
        size = 0
        matches = self._places.get(tuple(known[-self._shortest :]), []) if len(known) >= self._shortest else []
        for place in filter(self._goes_on, reversed(matches[-MOST_MATCHES:])):
            most, same = min(longest, len(known), place), self._shortest
            while same < most and self.tokens[place - 1 - same] == known[-1 - same]:
                same += 1
            if same >= size:
                best = [*best, place] if same == size else [place]
                size = same
        return best, size

    def continuation(self, known: Sequence[int], limit: int, longest: int) -> Offer:
        """Return up to `limit` tokens, each the most frequent one (latest on ties) after the drafts before it.
        Where those occur nowhere, the longest suffix of `known` and the drafts is matched anew."""
        drafts: list[int] = []
        places, matched_tokens = self.places_after(known, longest)
        while places and len(drafts) < limit:
            followers = [self.tokens[place] for place in places]
            drafts.append(followers[0] if len(places) == 1 else max(dict.fromkeys(followers), key=followers.count))
            stay = [place + 1 for place in places if self.tokens[place] == drafts[-1]]
            places = list(filter(self._goes_on, stay)) or self.places_after([*known[-longest:], *drafts], longest)[0]
        return Offer(tuple(drafts), matched_tokens)

    def _goes_on(self, place: int) -> bool:
        return place < len(self.tokens) and self.tokens[place] != END


class Ngram(Drafter):
    """Drafts from the sequence's own prompt and output, by matches of at least `shortest` tokens.

    A match counts up to `longest`. A bound that is not given takes its default, or what the other bound allows. The
    last `across_tokens` tokens of the same owner's earlier requests draft too. Other owners' never do: response times
    would leak what they said.
    """

    name = "ngram"

    def __init__(self, shortest: int | None = None, longest: int | None = None, *, across_tokens: int = 0) -> None:
        self._shortest = shortest or min(SHORTEST_MATCH_TOKENS, longest or SHORTEST_MATCH_TOKENS)
        self._longest = longest or max(LONGEST_MATCH_TOKENS, self._shortest)
        if not 1 <= self._shortest <= self._longest:
            raise ModelUnavailable(f"prompt_lookup_min must lie between 1 and {self._longest}, not {self._shortest}")
        self._across_tokens = across_tokens
        self._texts: dict[str, tuple[str, Text]] = {}
        """Owner and text of each request."""
        self._earlier: dict[str, Text] = {}
        """Earlier texts by owner; a full one drops its older half."""

    @classmethod
    def open(cls, unit: LoadedUnit) -> Drafter:
        across_tokens = ACROSS_TOKENS if unit.spec.ngram_across_requests else 0
        return cls(unit.spec.prompt_lookup_min, unit.spec.prompt_lookup_max, across_tokens=across_tokens)

    def admit(self, request: Request) -> None:
        self._texts[request.id] = request.owner, Text(self._shortest)

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:  # noqa: ARG002  drafts do not depend on sampling
        drafts = []
        for row in rows:
            known = tuple(usual for usual, *_ in row.forced)
            offer = self.offer(row.sequence_id, row.tokens, known, row.num_draft_tokens - len(known))
            drafts.append((*known, *(offer.tokens if offer else ())))
        counts = tuple(len(tokens) for tokens in drafts)
        reasons = tuple(NO_REASON if count else Reason("no_match") for count in counts)
        return Proposal(padded(drafts) if any(counts) else None, counts, reasons)

    def offer(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int], limit: int) -> Offer | None:
        if sequence_id not in self._texts:
            return None
        owner, own = self._texts[sequence_id]
        own.extend(tokens[len(own.tokens) :])
        own.extend(emitted)
        known = own.tokens[-self._longest :]
        own_offer = own.continuation(known, limit, self._longest)
        own.cut(len(emitted))
        earlier = self._earlier.get(owner)
        other = earlier.continuation(known, limit, self._longest) if earlier else own_offer
        return other if other.matched_tokens > own_offer.matched_tokens else own_offer

    def release(self, sequence_id: str) -> None:
        """End the sequence; its text joins the owner's earlier ones."""
        owner, text = self._texts.pop(sequence_id, ("", None))
        if text is None or not self._across_tokens:
            return
        earlier = self._earlier.pop(owner, Text(self._shortest))
        if len(earlier.tokens) + len(text.tokens) >= self._across_tokens:
            kept, earlier = earlier.tokens[-self._across_tokens // 2 :], Text(self._shortest)
            earlier.extend(kept)
        earlier.extend([*text.tokens[-self._across_tokens // 2 + 1 :], END])
        self._earlier[owner] = earlier
        if len(self._earlier) > OWNERS:
            del self._earlier[next(iter(self._earlier))]
