"""Constraints on an answer: a limit on its reasoning, a grammar for the rest. llguidance computes the masks.

A constraint is a function of the output so far, so each slot of a verify forward is masked by the drafts before it, and
the text is the same with and without speculation.
"""

import time
from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import takewhile
from typing import Any, NamedTuple

import llguidance
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par_with_draft_tokens
from numpy import int32, uint32, zeros

from app.core.request import Reasoning
from app.text.detokenizer import TokenTable
from app.text.forced_text import ForcedText, byte_tokenizer
from app.text.schema import reason_of
from app.text.spelling import Speller

GAPS = (b"\n", b"\n\n")
"""Texts that models write between their reasoning and the answer."""
FORCED_BYTES = 128
"""Bytes of forced text spelled at a time: more than the longest draft has."""
MASKS_SECONDS = 0.05
"""Budget for the masks of one row in a step, in seconds: the slower they are, the fewer tokens are drafted."""
LIMITS = llguidance.LLParserLimits(max_items_in_row=20_000)
"""Limits on the work for one mask: a few milliseconds each for lexer and parser. A parser row has an item for each
optional property of an object."""
DEAD_END = "what the answer is held to lets nothing follow here: simplify the schema or the grammar"


class Vocabulary:
    """A model's tokens, prepared for llguidance; built once, in a few tenths of a second for 150,000 tokens."""

    def __init__(self, table: TokenTable) -> None:
        self.pieces = table.pieces
        self.spell = Speller(table.pieces, table.spelling)
        self.stops = sorted(token for token in table.stop_token_ids if token < len(table.pieces))
        self.bos_token_id, self.eos_token_id = None, self.stops[0] if self.stops else len(table.pieces)
        self.special_token_ids = sorted(table.hidden_token_ids)
        # Ids without text must not be drawn: their first byte here, 0xFF, never occurs in UTF-8.
        self.tokens = [piece or b"\xff[%d]" % token for token, piece in enumerate(table.pieces)]
        if not self.stops:
            self.tokens.append(b"\xff[end]")
        self.tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(self), eos_token=self.stops or [self.eos_token_id]
        )
        self.executor = llguidance.LLExecutor(num_threads=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return tokens that spell `text`."""
        return self.spell(text)

    def enforce(self, grammar: str) -> "Enforced":
        """Return `grammar` at its beginning; the matcher's `get_error()` says what is wrong with it."""
        tokens, in_bytes = (
            llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            for tokenizer in (self.tokenizer, byte_tokenizer())
        )
        return Enforced(tokens, ForcedText(in_bytes))


class Enforced(NamedTuple):
    """A grammar at one place in an answer."""

    matcher: llguidance.LLMatcher
    text: ForcedText

    def copy(self) -> "Enforced":
        """Return an independent copy at the same place."""
        return Enforced(self.matcher.deep_copy(), self.text.copy())

    def broken(self, vocabulary: Vocabulary) -> str:
        """Advance to the first choice that the grammar leaves; return the error up to there, empty if there is none."""
        self.matcher.compute_bitmask()
        if not self.matcher.is_error():
            self.matcher.try_consume_tokens(vocabulary(self.text.next(FORCED_BYTES)))
            self.matcher.compute_bitmask()
        return str(self.matcher.get_error())


class Phase(Enum):
    """Part of the answer that an output has reached."""

    START = 0
    REASONING = 1
    GAP = 2
    ANSWER = 3


class AnswerConstraint:
    """`Constraint` of one output. Without a grammar any answer is allowed; without `reasoning` it begins at once."""

    def __init__(self, vocabulary: Vocabulary, enforced: Enforced | None, reasoning: Reasoning | None) -> None:
        self._error = ""
        self._vocabulary = vocabulary
        self._pristine = enforced
        begun = enforced.copy() if enforced else None
        self._matcher = begun.matcher if begun else None
        self._text = begun.text if begun else None
        self._reasoning = reasoning
        self._spelled: tuple[bytes, tuple[tuple[int, ...], ...]] = b"", ()
        """Forced text of the last call of `forced`, and its tokens."""
        self._mask_seconds = 0.0
        """Time per mask in the last step, in seconds."""
        self._opening: int | None = None
        self._closing: list[int] = []
        self._gaps: set[int] = set()
        self._phase = Phase.ANSWER
        if reasoning is not None:
            spelled = vocabulary(reasoning.opening.encode())
            self._opening = spelled[0] if len(spelled) == 1 else None
            self._closing = vocabulary(reasoning.closing.encode())
            self._gaps = {token for gap in GAPS for token in vocabulary(gap) if vocabulary.pieces[token] == gap}
            self._phase = Phase.REASONING if reasoning.inside else Phase.START
        self._thought = 0
        """Tokens of reasoning so far."""
        self._tail = b""
        """Last bytes of the reasoning."""
        self._read = 0
        """Tokens of the output followed so far."""

    def begin(self) -> "AnswerConstraint":
        return AnswerConstraint(self._vocabulary, self._pristine, self._reasoning)

    def binds(self, output: Sequence[int], slots: int) -> bool:
        self._follow(output)
        if self._matcher is not None or self._phase is Phase.ANSWER:
            return self._matcher is not None
        most = self._reasoning.most_tokens if self._reasoning else None
        return most is not None and self._thought + slots > most

    def forced(self, output: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        self._follow(output)
        if self._phase is Phase.REASONING:
            return tuple((token,) for token in self._must_close())
        if self._phase is not Phase.ANSWER or self._text is None or self._error:
            return ()
        if (text := self._text.next(FORCED_BYTES)) != self._spelled[0]:  # a step asks before and after it
            self._spelled = text, tuple(self._places(text))
        return self._spelled[1]

    def _places(self, text: bytes) -> Iterator[tuple[int, ...]]:
        for token in self._vocabulary(text)[:-1]:  # the last one may be part of a longer token
            others = self._vocabulary.spell.beginnings(text)
            yield token, *(other for other in others if other != token)
            text = text[len(self._vocabulary.pieces[token]) :]

    def forced_after(self, output: Sequence[int], drafts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        self._follow(output)
        if self._phase is not Phase.ANSWER or self._matcher is None or self._text is None or self._error:
            return len(drafts), ()
        known, text = self._known(drafts), self._text.copy()
        try:
            standing = self._matcher.deep_copy().validate_tokens(known)
        except ValueError:  # beyond `LIMITS`, which `allow` meets and reports too
            return len(drafts), ()
        for token in known[:standing]:
            text.follow(self._vocabulary.pieces[token])
        return standing, tuple(self._vocabulary(text.next(FORCED_BYTES))[:-1])

    @property
    def affordable_drafts(self) -> int:
        return int(MASKS_SECONDS / self._mask_seconds) if self._mask_seconds else FORCED_BYTES

    def opening(self, output: Sequence[int]) -> int | None:
        self._follow(output)
        return self._opening if self._phase is Phase.START and self._matcher is not None else None

    def allow(self, output: Sequence[int], drafts: Sequence[int], masks: Any) -> int:
        self._follow(output)
        start = self._phase, self._thought, self._tail
        for tried in (drafts, ()):
            try:
                return self._allow(tried, masks)
            except ValueError as error:  # beyond `LIMITS`: nesting, lexer time
                if not tried:
                    self._error = reason_of(error)
            finally:
                self._phase, self._thought, self._tail = start
        return 0

    def failure(self, output: Sequence[int]) -> str:
        self._follow(output)
        return self._error

    def _allow(self, drafts: Sequence[int], masks: Any) -> int:
        slot = 0
        while True:
            if self._phase is Phase.REASONING:
                must = self._must_close()[:1]
                if must:
                    masks[slot] = 0
                    _set(masks[slot], must)
                elif self._matcher is not None:  # the answer is still to come
                    _clear(masks[slot], self._vocabulary.stops)
                stands = slot < len(drafts) and (not must or drafts[slot] == must[0])
            else:
                opens = self._phase is Phase.START and slot < len(drafts) and drafts[slot] == self._opening
                extra = self._gaps if self._phase is Phase.GAP else ()
                stands = opens or (slot < len(drafts) and drafts[slot] in extra)
                if not stands:
                    return self._match(drafts, masks, slot, extra)
                self._match((), masks, slot, extra)
            if not stands:
                return slot
            self._move(drafts[slot])
            slot += 1

    def _match(self, drafts: Sequence[int], masks: Any, slot: int, extra: Sequence[int] | set[int]) -> int:
        """Write the grammar's masks from `slot` on, where `extra` is allowed too; return how many drafts stand."""
        if self._matcher is None:
            return len(drafts)
        began = time.perf_counter()
        rest = self._known(drafts[slot:])
        valid, own = self._filled(self._matcher, rest) if rest else (0, None)
        if own is None:
            own = zeros((1, self._words), int32)
            fill_next_token_bitmask(self._matcher, own)
            if self._matcher.is_error():
                self._error = DEAD_END
        words = self._words
        part = masks[slot : slot + valid + 1]
        part[:] = 0
        part[:, : min(words, part.shape[1])] = own[:, : part.shape[1]]
        _set(masks[slot], extra)
        self._mask_seconds = (time.perf_counter() - began) / (1 + valid)
        return slot + valid

    @property
    def _words(self) -> int:
        """Number of 32-bit words in a mask."""
        return (self._vocabulary.tokenizer.vocab_size + 31) // 32

    def _filled(self, matcher: llguidance.LLMatcher, drafts: list[int]) -> tuple[int, Any]:
        """Return how many drafts can stand and the masks before and behind them; (0, None) if none can.

        A draft that nothing could follow does not stand, whichever drafter made it: if the target draws that token
        itself, the next step finds the dead end. Works on a copy, since a dead end breaks a matcher for good.
        """
        ahead = matcher.deep_copy()
        valid = ahead.validate_tokens(drafts)
        while valid:
            own = zeros((valid + 1, self._words), int32)
            work = [(ahead, 0, drafts[:valid])]
            fill_next_token_bitmask_par_with_draft_tokens(self._vocabulary.executor, work, own)
            if not ahead.is_error():
                return valid, own
            valid, ahead = valid - 1, matcher.deep_copy()
        return 0, None

    def _known(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts before the first id beyond the tokens (a padded vocabulary): it would end the matcher."""
        return list(takewhile(lambda token: token < self._vocabulary.tokenizer.vocab_size, drafts))

    def _follow(self, output: Sequence[int]) -> None:
        for token in output[self._read :]:
            self._read += 1
            if not self._move(token) or self._matcher is None or self._text is None or self._error:
                continue
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._text.follow(self._vocabulary.pieces[token] if token < len(self._vocabulary.pieces) else b"")
                if self._matcher.is_error():  # for example, the answer ends before its grammar does
                    self._error = reason_of(self._matcher.get_error())

    def _move(self, token: int) -> bool:
        """Advance past `token`, and return whether it belongs to the answer."""
        if self._phase is Phase.START and token == self._opening:
            self._phase = Phase.REASONING
            return False
        if self._phase is Phase.REASONING:
            closing = self._reasoning.closing.encode() if self._reasoning else b""
            self._thought += 1
            piece = self._vocabulary.pieces[token] if token < len(self._vocabulary.pieces) else b""
            ending = self._tail + piece
            self._tail = ending[-len(closing) :]
            if closing in ending:
                self._phase = Phase.GAP
            return False
        is_gap = self._phase is Phase.GAP and token in self._gaps
        self._phase = Phase.ANSWER
        return not is_gap

    def _must_close(self) -> list[int]:
        """Return the tokens left of the closing mark once the reasoning has reached its limit."""
        most = self._reasoning.most_tokens if self._reasoning else None
        return [] if most is None or self._thought < most else self._closing[self._thought - most :]


def _set(mask: Any, tokens: Sequence[int] | set[int]) -> None:
    bits = mask.view(uint32)
    for token in tokens:
        bits[token // 32] |= uint32(1 << token % 32)


def _clear(mask: Any, tokens: Sequence[int]) -> None:
    bits = mask.view(uint32)
    for token in tokens:
        bits[token // 32] &= ~uint32(1 << token % 32)
