"""Constraints on an answer: a limit on its reasoning, a grammar for the rest. llguidance computes the masks.

A constraint is a function of the output so far, so the mask of each slot of a verify forward depends on the drafts
before it, and the text is the same with and without speculation.
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
from app.text.grammar.forced_text import ForcedText, byte_tokenizer
from app.text.grammar.schema import reason_of
from app.text.harmony import FINAL_HEADER, read_header
from app.text.spelling import ApproximateTokenizer

GAPS = (b"\n", b"\n\n")
"""Separators that models write between their reasoning and the answer."""
FORCED_BYTES = 128
"""Bytes of forced text tokenized at a time: more than the longest draft has."""
MASKS_SECONDS = 0.05
"""Budget for the masks of one row in a step, in seconds: the slower they are, the fewer tokens are drafted."""
LIMITS = llguidance.LLParserLimits(max_items_in_row=20_000)
"""Limits on the work for one mask: a few milliseconds each for lexer and parser. A parser row has an item for each
optional property of an object."""
MESSAGE_EDGES = frozenset({b"<|start|>", b"<|end|>"})
HEADER_BYTES = 512
"""Number of bytes, from the start of a message, that are searched for its header."""
DEAD_END = "the grammar allows no next token here: simplify the schema or the grammar"


class Vocabulary:
    """A model's tokens, prepared for llguidance; built once, in a few tenths of a second for 150,000 tokens."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self.pieces = table.pieces
        self.approximate_tokenizer = ApproximateTokenizer(table.pieces, table.spelling)
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
        return self.approximate_tokenizer(text)

    def compile_grammar(self, grammar: str) -> "GrammarState":
        """Compile `grammar` to its initial state; the matcher's `get_error()` explains a failure."""
        token_matcher, byte_matcher = (
            llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
            for tokenizer in (self.tokenizer, byte_tokenizer())
        )
        return GrammarState(token_matcher, ForcedText(byte_matcher))


class GrammarState(NamedTuple):
    """State of a grammar at one position of an answer."""

    matcher: llguidance.LLMatcher
    text: ForcedText

    def copy(self) -> "GrammarState":
        """Return an independent copy at the same position."""
        return GrammarState(self.matcher.deep_copy(), self.text.copy())

    def first_error(self, vocabulary: Vocabulary) -> str:
        """Advance past the text that the grammar forces at the start; return the first error, or an empty text."""
        self.matcher.compute_bitmask()
        if not self.matcher.is_error():
            self.matcher.try_consume_tokens(vocabulary(self.text.next(FORCED_BYTES)))
            self.matcher.compute_bitmask()
        return str(self.matcher.get_error())


class Phase(Enum):
    """Phase of the answer that an output has reached."""

    START = 0
    REASONING = 1
    GAP = 2
    ANSWER = 3


class AnswerConstraint:
    """`Constraint` of one output. Without a grammar any answer is allowed; without `reasoning`, the output has none."""

    def __init__(self, vocabulary: Vocabulary, initial_state: GrammarState | None, reasoning: Reasoning | None) -> None:
        self._error = ""
        self._vocabulary = vocabulary
        self._initial_state = initial_state
        if initial_state:
            initial_state.text.next(FORCED_BYTES)  # found once for all choices, on the thread that makes the first one
        grammar_state = initial_state.copy() if initial_state else None
        self._matcher = grammar_state.matcher if grammar_state else None
        self._text = grammar_state.text if grammar_state else None
        self._reasoning = reasoning
        self._forced_tokens: tuple[bytes, tuple[tuple[int, ...], ...]] = b"", ()
        """Forced text at the last call of `forced`, and its tokens with their alternatives."""
        self._mask_seconds = 0.0
        """Time per mask in the last step, in seconds."""
        self._closing_tokens: list[int] = []
        self._message = b""
        """Beginning of gpt-oss's current message inside the reasoning."""
        self._gaps: set[int] = set()
        self._openings: set[int] = set()
        """Tokens with which reasoning may begin: the first of its marker, or white space before it."""
        self._phase = Phase.ANSWER
        if reasoning is not None:
            self._closing_tokens = vocabulary(reasoning.closing.encode())
            self._gaps = {token for gap in GAPS for token in vocabulary(gap) if vocabulary.pieces[token] == gap}
            marker_start = vocabulary(self._opening)[:1]
            self._openings = {
                token for token in (*marker_start, *self._gaps) if self._is_whole(token) or not self._in_grammar(token)
            }
            self._phase = Phase.REASONING if reasoning.inside else Phase.START
        self._reasoning_tokens = 0
        """Number of reasoning tokens so far."""
        self._tail = b""
        """Last bytes of the reasoning, or of its opening marker."""
        self._consumed_tokens = 0
        """Number of output tokens consumed so far."""

    def begin(self) -> "AnswerConstraint":
        return AnswerConstraint(self._vocabulary, self._initial_state, self._reasoning)

    def binds(self, output: Sequence[int], slots: int) -> bool:
        self._consume(output)
        if self._matcher is not None or self._phase is Phase.ANSWER:
            return self._matcher is not None
        limit = self._reasoning.most_tokens if self._reasoning else None
        return limit is not None and self._reasoning_tokens + slots > limit

    def forced(self, output: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        self._consume(output)
        if self._in_reasoning:
            return tuple((token,) for token in self._forced_marker())
        if self._phase is not Phase.ANSWER or self._text is None or self._error:
            return ()
        if (text := self._text.next(FORCED_BYTES)) != self._forced_tokens[0]:  # asked after a step and before the next
            self._forced_tokens = text, tuple(self._token_alternatives(text))
        return self._forced_tokens[1]

    def _token_alternatives(self, text: bytes) -> Iterator[tuple[int, ...]]:
        for token in self._vocabulary(text)[:-1]:  # the last one may be part of a longer token
            others = self._vocabulary.approximate_tokenizer.first_tokens(text)
            yield token, *(other for other in others if other != token)
            text = text[len(self._vocabulary.pieces[token]) :]

    def forced_after(self, output: Sequence[int], drafts: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        self._consume(output)
        if self._phase is not Phase.ANSWER or self._matcher is None or self._text is None or self._error:
            return len(drafts), ()
        known_drafts, text = self._within_vocabulary(drafts), self._text.copy()
        try:
            valid_drafts = self._matcher.deep_copy().validate_tokens(known_drafts)
        except ValueError:  # beyond `LIMITS`: `allow` fails too, and reports it
            return len(drafts), ()
        for token in known_drafts[:valid_drafts]:
            text.consume(self._vocabulary.pieces[token])
        forced = text.next(FORCED_BYTES)
        self._text.is_slow |= text.is_slow
        return valid_drafts, tuple(self._vocabulary(forced)[:-1])

    @property
    def affordable_drafts(self) -> int:
        return int(MASKS_SECONDS / self._mask_seconds) if self._mask_seconds else FORCED_BYTES

    def openings(self, output: Sequence[int]) -> Sequence[int]:
        self._consume(output)
        may_open = self._phase is Phase.START and self._matcher is not None and not self._tail
        return sorted(self._openings) if may_open else ()

    def allow(self, output: Sequence[int], drafts: Sequence[int], masks: Any) -> int:
        self._consume(output)
        start = self._phase, self._reasoning_tokens, self._tail, self._message
        for attempt in (drafts, ()):
            try:
                return self._allow(attempt, masks)
            except ValueError as error:  # beyond `LIMITS`: nesting, lexer time
                if not attempt:
                    self._error = reason_of(error)
            finally:
                self._phase, self._reasoning_tokens, self._tail, self._message = start
        return 0

    def failure(self, output: Sequence[int]) -> str:
        self._consume(output)
        return self._error

    def _allow(self, drafts: Sequence[int], masks: Any) -> int:
        slot = 0
        while True:
            if self._in_reasoning:
                forced_tokens = self._forced_marker()[:1]
                if forced_tokens:
                    masks[slot] = 0
                    _allow_tokens(masks[slot], forced_tokens)
                elif self._matcher is not None:  # the answer is still to come, unless a call ends it
                    _forbid_tokens(masks[slot], [] if self._is_in_call() else self._vocabulary.stops)
                is_valid = slot < len(drafts) and (not forced_tokens or drafts[slot] == forced_tokens[0])
            else:
                opens = self._phase is Phase.START and slot < len(drafts) and self._may_open(drafts[slot])
                also_allowed = self._gaps if self._phase is Phase.GAP else ()
                is_valid = opens or (slot < len(drafts) and drafts[slot] in also_allowed)
                if not is_valid:
                    return self._fill_masks(drafts, masks, slot, also_allowed)
                self._fill_masks((), masks, slot, also_allowed)
            if not is_valid:
                return slot
            self._advance(drafts[slot])
            slot += 1

    def _fill_masks(self, drafts: Sequence[int], masks: Any, slot: int, also_allowed: Sequence[int] | set[int]) -> int:
        """Write the grammar's masks from `slot` on, with `also_allowed` added; return how many drafts are valid."""
        if self._matcher is None:
            return len(drafts)
        began = time.perf_counter()
        rest = self._within_vocabulary(drafts[slot:])
        valid, grammar_masks = self._draft_masks(self._matcher, rest) if rest else (0, None)
        if grammar_masks is None:
            grammar_masks = zeros((1, self._mask_words), int32)
            fill_next_token_bitmask(self._matcher, grammar_masks)
            if self._matcher.is_error():
                self._error = DEAD_END
        words = self._mask_words
        rows = masks[slot : slot + valid + 1]
        rows[:] = 0
        rows[:, : min(words, rows.shape[1])] = grammar_masks[:, : rows.shape[1]]
        _allow_tokens(masks[slot], also_allowed)
        self._mask_seconds = (time.perf_counter() - began) / (1 + valid)
        return slot + valid

    @property
    def _mask_words(self) -> int:
        """Number of 32-bit words in a mask."""
        return (self._vocabulary.tokenizer.vocab_size + 31) // 32

    def _draft_masks(self, matcher: llguidance.LLMatcher, drafts: list[int]) -> tuple[int, Any]:
        """Return the number of valid drafts and the masks before and after each; (0, None) if none is valid.

        A draft that nothing could follow is not valid, whichever drafter made it: if the target draws that token
        itself, the next step finds the dead end. It is checked on a copy, since a dead end breaks a matcher for good.
        """
        lookahead = matcher.deep_copy()
        valid = lookahead.validate_tokens(drafts)
        while valid:
            grammar_masks = zeros((valid + 1, self._mask_words), int32)
            batch = [(lookahead, 0, drafts[:valid])]
            fill_next_token_bitmask_par_with_draft_tokens(self._vocabulary.executor, batch, grammar_masks)
            if not lookahead.is_error():
                return valid, grammar_masks
            valid, lookahead = valid - 1, matcher.deep_copy()
        return 0, None

    def _within_vocabulary(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts before the first id outside the vocabulary (padding), which would break the matcher."""
        return list(takewhile(lambda token: token < self._vocabulary.tokenizer.vocab_size, drafts))

    def _consume(self, output: Sequence[int]) -> None:
        for token in output[self._consumed_tokens :]:
            self._consumed_tokens += 1
            if not self._advance(token) or self._matcher is None or self._text is None or self._error:
                continue
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._text.consume(self._vocabulary.pieces[token] if token < len(self._vocabulary.pieces) else b"")
                if self._matcher.is_error():  # for example, the answer ends before its grammar does
                    self._error = reason_of(self._matcher.get_error())

    def _advance(self, token: int) -> bool:
        """Advance past `token`, and return whether it belongs to the answer."""
        piece = self._vocabulary.pieces[token] if token < len(self._vocabulary.pieces) else b""
        if self._phase is Phase.START and self._may_open(token):
            begun, opening = (self._tail + piece).lstrip(), self._opening
            if begun.startswith(opening):
                self._phase, self._tail = Phase.REASONING, b""
                return False
            if opening.startswith(begun):
                self._tail += piece
                return False
        if self._phase is Phase.REASONING:
            closing = self._reasoning.closing.encode() if self._reasoning else b""
            self._reasoning_tokens += 1
            ending = self._tail + piece
            self._tail = ending[-len(closing) :]
            self._message = b"" if piece in MESSAGE_EDGES else (self._message + piece)[:HEADER_BYTES]
            if closing in ending or (closing.endswith(b"<|message|>") and FINAL_HEADER.search(self._message)):
                self._phase = Phase.GAP
            return False
        is_gap = self._phase is Phase.GAP and token in self._gaps
        self._phase = Phase.ANSWER
        return not is_gap

    def _is_in_call(self) -> bool:
        """Return whether the reasoning has reached a message that calls an offered function."""
        header, begins, _ = self._message.partition(b"<|message|>")
        called = read_header(header.decode("utf-8", "replace")).recipient if begins else ""
        names = self._reasoning.call_names if self._reasoning else ()
        return called in names

    @property
    def _opening(self) -> bytes:
        return self._reasoning.opening.encode() if self._reasoning else b""

    @property
    def _in_reasoning(self) -> bool:
        """Whether reasoning has begun; under a grammar, its opening marker need not be complete."""
        return self._phase is Phase.REASONING or (
            self._phase is Phase.START and bool(self._tail) and self._matcher is not None
        )

    def _is_whole(self, token: int) -> bool:
        """Return whether a token is all of the opening marker."""
        return self._vocabulary.pieces[token] == self._opening

    def _in_grammar(self, token: int) -> bool:
        """Return whether the answer itself may begin with `token`."""
        try:
            return self._matcher is not None and self._matcher.deep_copy().validate_tokens([token]) > 0
        except ValueError:  # beyond `LIMITS`: `allow` fails too, and reports it
            return True

    def _may_open(self, token: int) -> bool:
        """Return whether a token at the start may belong to the opening marker of reasoning. Under a grammar, its
        first token decides: the rest of the marker is forced."""
        return self._matcher is None or bool(self._tail) or token in self._openings

    def _forced_marker(self) -> list[int]:
        """Return the remaining tokens of an opening marker that was begun under a grammar, or those of the closing
        marker once the reasoning has reached its limit."""
        if self._phase is Phase.START:
            return self._vocabulary(self._opening[len(self._tail.lstrip()) :])
        limit = self._reasoning.most_tokens if self._reasoning else None
        return (
            []
            if limit is None or self._reasoning_tokens < limit
            else self._closing_tokens[self._reasoning_tokens - limit :]
        )


def _allow_tokens(mask: Any, tokens: Sequence[int] | set[int]) -> None:
    bits = mask.view(uint32)
    for token in tokens:
        bits[token // 32] |= uint32(1 << token % 32)


def _forbid_tokens(mask: Any, tokens: Sequence[int]) -> None:
    bits = mask.view(uint32)
    for token in tokens:
        bits[token // 32] &= ~uint32(1 << token % 32)
