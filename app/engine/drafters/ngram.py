"""Prompt lookup: proposes what followed the longest earlier match of the last tokens.

It needs no model and pays off for copying, editing and code (after prompt lookup decoding, A. Saxena 2023, and vLLM's
n-gram proposer: the longest match wins). Of several continuations it takes the most frequent token, the latest on ties;
each draft extends the context of the next one (SuffixDecoding, arXiv 2411.04975).
"""

from collections.abc import Iterable, Sequence

from app.core.errors import ModelUnavailable
from app.core.reason import DRAFTER_READS, NO_REASON, Reason
from app.core.request import Request
from app.core.step import DecodeRow, Offer
from app.engine.drafters.drafter import Drafter, Proposal
from app.engine.loaded_unit import LoadedUnit
from app.engine.runner import padded
from app.engine.sampling.drawing import SampledRow

SHORTEST_MATCH_TOKENS = 2
LONGEST_MATCH_TOKENS = 32
MAX_MATCHES = 32
"""Maximum number of matches to consider for a context, latest first."""
EXTEND_TOKENS = 4_096
"""Maximum number of tokens of a text that are indexed at a time: some 10 ms. A prompt is indexed while it is read."""
ACROSS_TOKENS = 32_768
OWNERS = 8
"""Maximum number of owners whose earlier requests are stored; the owner idle longest is dropped."""
END = -1
"""Separator of texts, so that no match spans two of them."""


class Text:
    """A growing list of tokens, with the positions after each context of `shortest` tokens."""

    def __init__(self, shortest: int) -> None:
        self.tokens: list[int] = []
        self._shortest = shortest
        self._positions: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._current_positions().append(len(self.tokens))

    def truncate(self, count: int) -> None:
        """Forget the last `count` tokens."""
        for _ in range(count):
            self._current_positions().pop()
            self.tokens.pop()

    def _current_positions(self) -> list[int]:
        """Return the positions after the current context; one shorter than `shortest` tokens is never looked up."""
        return self._positions.setdefault(tuple(self.tokens[-self._shortest :]), [])

    def continuations_of(self, context: Sequence[int], longest: int) -> tuple[list[int], int]:
        """Find the longest suffix of `context` that the text continues; return the positions after it, latest first,
        and the suffix's length: `shortest` to `longest` tokens, or 0 if there is none."""
        best: list[int] = []
        longest_match = 0
        matches = self._positions.get(tuple(context[-self._shortest :]), []) if len(context) >= self._shortest else []
        for position in filter(self._continues, reversed(matches[-MAX_MATCHES:])):
            limit, matched = min(longest, len(context), position), self._shortest
            while matched < limit and self.tokens[position - 1 - matched] == context[-1 - matched]:
                matched += 1
            if matched >= longest_match:
                best = [*best, position] if matched == longest_match else [position]
                longest_match = matched
        return best, longest_match

    def continuation(self, context: Sequence[int], limit: int, longest: int) -> Offer:
        """Return up to `limit` tokens, each the most frequent one (latest on ties) after the drafts before it.
        Where no match continues, the longest suffix of `context` plus drafts is matched again."""
        drafts: list[int] = []
        positions, matched_tokens = self.continuations_of(context, longest)
        while positions and len(drafts) < limit:
            followers = [self.tokens[position] for position in positions]
            drafts.append(followers[0] if len(positions) == 1 else max(dict.fromkeys(followers), key=followers.count))
            next_positions = [position + 1 for position in positions if self.tokens[position] == drafts[-1]]
            positions = (
                list(filter(self._continues, next_positions))
                or self.continuations_of([*context[-longest:], *drafts], longest)[0]
            )
        return Offer(tuple(drafts), matched_tokens)

    def _continues(self, position: int) -> bool:
        return position < len(self.tokens) and self.tokens[position] != END


class Ngram(Drafter):
    """Drafts from the sequence's own prompt and output, after matches of at least `shortest` tokens.

    Matches are compared up to `longest` tokens. A bound that is None takes its default, or the nearest value that the
    other bound allows. The last `across_tokens` tokens of the same owner's earlier requests are searched too. Those of
    other owners never are: response times would leak their texts.
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
            forced = tuple(usual for usual, *_ in row.forced)
            offer = self.offer(row.sequence_id, row.tokens, forced, row.num_draft_tokens - len(forced))
            drafts.append((*forced, *(offer.tokens if offer else ())))
        counts = tuple(len(tokens) for tokens in drafts)
        reasons = tuple(
            NO_REASON
            if count
            else DRAFTER_READS
            if self._is_behind(row.sequence_id, row.tokens)
            else Reason("no_match")
            for count, row in zip(counts, rows, strict=True)
        )
        return Proposal(padded(drafts), counts, reasons)

    def _is_behind(self, sequence_id: str, tokens: Sequence[int]) -> bool:
        """Return whether some of the text is not indexed yet."""
        return sequence_id in self._texts and len(self._texts[sequence_id][1].tokens) < len(tokens)

    def offer(self, sequence_id: str, tokens: Sequence[int], emitted: Sequence[int], limit: int) -> Offer | None:
        if sequence_id not in self._texts:
            return None
        owner, history = self._texts[sequence_id]
        indexed = len(history.tokens)
        history.extend(tokens[indexed : indexed + EXTEND_TOKENS])
        if self._is_behind(sequence_id, tokens):
            return Offer()
        history.extend(emitted)
        context = history.tokens[-self._longest :]
        own_offer = history.continuation(context, limit, self._longest)
        history.truncate(len(emitted))
        earlier = self._earlier.get(owner)
        other = earlier.continuation(context, limit, self._longest) if earlier else own_offer
        return other if other.matched_tokens > own_offer.matched_tokens else own_offer

    def release(self, sequence_id: str) -> None:
        """End the sequence; its text joins the owner's earlier ones."""
        owner, text = self._texts.pop(sequence_id, ("", None))
        if text is None or not self._across_tokens:
            return
        earlier = self._earlier.pop(owner, Text(self._shortest))
        if len(earlier.tokens) + len(text.tokens) >= self._across_tokens:
            newest, earlier = earlier.tokens[-self._across_tokens // 2 :], Text(self._shortest)
            earlier.extend(newest)
        earlier.extend([*text.tokens[-self._across_tokens // 2 + 1 :], END])
        self._earlier[owner] = earlier
        if len(self._earlier) > OWNERS:
            del self._earlier[next(iter(self._earlier))]
