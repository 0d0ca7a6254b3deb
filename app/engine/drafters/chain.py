"""Drafters with a model of their own. They draft one token after the other, each with those before it as its prefix."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Proposal
from app.engine.rectangle import last_of
from app.engine.runner import Runner
from app.engine.sampling import SampledRow, adjust, draw


class Chain:
    """The drafts of one proposal so far: int32 [rows, 1] each, in `drafts`.

    They are drawn with the same noise as the target will use at that position (Gumbel coupling, arXiv 2408.07978).
    `vocabulary` is the width of the target's logits.
    """

    def __init__(self, sampled: Sequence[SampledRow], vocabulary: int) -> None:
        self._sampled = sampled
        self._vocabulary = vocabulary
        self._logits: list[mx.array] = []
        self.drafts: list[mx.array] = []

    def pick(self, logits: mx.array) -> mx.array:
        """Draw the next draft of each row from `logits` [rows, 1, vocabulary or more]; the device starts on it."""
        drafted = len(self.drafts)
        ahead = [replace(row, pending=row.pending + drafted) for row in self._sampled]
        fed = mx.concatenate(self.drafts, axis=1) if drafted else None
        logits = adjust(logits[..., : self._vocabulary].astype(mx.float32), ahead, fed)
        self._logits.append(logits)
        self.drafts.append(draw(logits, ahead, noise_vocabulary=self._vocabulary))
        mx.async_eval(self.drafts[-1])  # the device drafts while the host builds the next forward
        return self.drafts[-1]

    def result(self) -> tuple[mx.array, mx.array]:
        """int32 [rows, drafts] and the logits [rows, drafts, vocabulary] that they were drawn from."""
        return mx.concatenate(self.drafts, axis=1), mx.concatenate(self._logits, axis=1)


class ModelDrafter(Drafter):
    """Drafts with the model of `runner`, or with its verb `extend` where it has one, up to `max_context_tokens` a row.

    `target_vocabulary` is the width of the target's logits.
    """

    runner: Runner

    def __init__(self, runner: Runner, *, target_vocabulary: int, max_context_tokens: int) -> None:
        self.runner = runner
        self._target_vocabulary = target_vocabulary
        self._max_context_tokens = max_context_tokens
        self._call = getattr(runner.model, "extend", None)
        self._lengths: dict[str, int] = {}
        self._states: list[list[list[mx.array | None]]] = []
        """Of the last chain: cached length of each row without its drafts; recurrent states after each of them."""

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        reasons = tuple(self._refusal(row) for row in rows)
        counts = tuple(0 if reason else self._limit(row) for row, reason in zip(rows, reasons, strict=True))
        places = {row.sequence_id: place for place, row in enumerate(rows) if counts[place]}
        if not places:
            return Proposal(None, counts, reasons)
        for name in places:
            self.runner.claim_once(name)
        drafting = [places[name] for name in self.runner.ordered(list(places))]
        tokens, logits = self._draft(
            [rows[place] for place in drafting], [sampled[place] for place in drafting], max(counts)
        )
        if drafting != list(range(len(rows))):  # the answer lies as it was asked, with anything for the other rows
            order = mx.array([drafting.index(place) if place in drafting else 0 for place in range(len(rows))])
            tokens, logits = tokens[order], logits[order]
        return Proposal(tokens, counts, reasons, logits)

    def _limit(self, row: DecodeRow) -> int:
        return row.num_draft_tokens if self.longest is None else min(row.num_draft_tokens, self.longest)

    def _refusal(self, row: DecodeRow) -> str:
        """Why a row gets no drafts now; "" when it does."""
        full = len(row.tokens) + self._limit(row) > self._max_context_tokens
        return "the drafter's context is full" if full else ""

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        """int32 [rows, width] and the logits they were drawn from, for `rows` in slot order; nothing is read here."""
        names = [row.sequence_id for row in rows]
        output, widths = self._catch_up(rows)
        output = last_of(output, widths)
        self._lengths = {name: self.runner.length(name) for name in names}
        self._states = [self.runner.state_rows()]
        chain = Chain(sampled, self._target_vocabulary)
        chain.pick(self._logits(output))
        for _ in range(width - 1):
            output = self._feed(names, self._inputs(chain.drafts[-1], output), [1] * len(names))
            self._states.append(self.runner.state_rows())
            chain.pick(self._logits(output))
        return chain.result()

    def _catch_up(self, rows: Sequence[DecodeRow]) -> tuple[mx.array, list[int]]:
        """Feed what the model has not read yet; its output [rows, width, …] and each row's real width."""
        raise NotImplementedError

    def _inputs(self, drafts: mx.array, output: mx.array) -> mx.array:  # noqa: ARG002
        """What the model reads for `drafts` int32 [rows, 1], which its last `output` [rows, 1, …] led to."""
        return drafts

    def _logits(self, output: mx.array) -> mx.array:
        return output

    def _feed(self, names: Sequence[str], inputs: mx.array, widths: Sequence[int]) -> mx.array:
        """Run the model over `inputs` [rows, width, …] and keep all that is real of them; its output."""
        output, forward = self.runner.forward(names, inputs, widths, call=self._call)
        self.runner.commit(forward, widths)
        return output

    def _rewind(self, accepted: Mapping[str, int]) -> None:
        """Let only `accepted` of the drafts in each row's cache stay; the last one was never fed."""
        stay = {name: min(accepted[name], len(self._states) - 1) for name in accepted.keys() & self._lengths.keys()}
        for name, drafts in stay.items():
            self.runner.rewind(name, self._lengths[name] + drafts)
        if stay and self.runner.caches.states:
            slots = self.runner.caches.table.slots
            self.runner.restore_rows(self._states, {slots[name]: drafts for name, drafts in stay.items()})
        self._lengths, self._states = {}, []
