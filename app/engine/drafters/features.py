"""What drafters share that read the target's hidden states: features wait, row by row, until the context takes them.

A prompt's features enter the drafter's context chunk by chunk. Those of decode steps wait for the next proposal, so
that a plain stretch costs nothing; at most `WAITING_TOKENS` of them are kept. What was dropped, or came from a prefix
cache without features, is a gap: the context goes on behind it at the right positions.
"""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from app.core.errors import ModelUnavailable
from app.core.request import Request
from app.core.step import DecodeRow
from app.engine.drafters import Drafter, Outcome
from app.engine.drafters.draft_model import DraftModel
from app.engine.drafters.feature_module import FeatureModule, Target
from app.engine.rectangle import padded
from app.engine.runner import Runner
from app.engine.sampling import SampledRow
from app.engine.unit import LoadedUnit

WAITING_TOKENS = 256
EXTEND_AT_ONCE_TOKENS = 32


class Waiting:
    """Features of one row that its context does not hold yet: positions `start` … `stop` - 1, one after the other."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._parts: list[mx.array] = []

    def add(self, start: int, features: mx.array) -> None:
        """Features [1, n, size] of the positions from `start` on; older ones than a gap or the bound are dropped."""
        if start != self.stop:
            self._parts, self.start = [], start
        self._parts.append(features)
        self.stop = start + features.shape[1]
        while self.stop - self.start > WAITING_TOKENS and len(self._parts) > 1:
            self.start += self._parts.pop(0).shape[1]

    def take(self) -> mx.array:
        """All of them [1, n, size], and none is left."""
        taken = mx.concatenate(self._parts, axis=1)
        self._parts, self.start = [], self.stop
        return taken


class FeatureDrafter(DraftModel):
    """A draft model that is a `FeatureModule`, whose context is extended by what the target put out.

    As it is, for EAGLE-3 and MTP: a layer that reads (token, hidden state of the position before) and drafts on its own
    state. What drafting wrote is taken back at once; the accepted tokens enter again with the target's true features
    (EAGLE, arXiv 2401.15077 and 2503.01840).
    """

    def __init__(self, runner: Runner, target: Target) -> None:
        self._module: FeatureModule = runner.model
        self._target = target
        context, vocabulary = self._module.config.max_position_embeddings, target.vocabulary_size
        super().__init__(runner, target_vocabulary=vocabulary, max_context_tokens=context)
        self.taps, self.longest = self._module.config.taps, self._module.longest
        self._embed = self._module.get("embed_tokens", target.embed)
        self._waiting: dict[str, Waiting] = {}

    @classmethod
    def open(cls, unit: LoadedUnit) -> Drafter:
        draft = unit.draft(cls.name)
        try:
            target = Target(unit.target, unit.config, unit.vocabulary_size)
        except ValueError as error:
            raise ModelUnavailable(f"the model's hidden states cannot be read: {error}") from error
        return cls(Runner(draft.model, chunk_tokens=unit.spec.prefill_chunk_tokens, probe=False), target)

    def admit(self, request: Request) -> None:
        self.runner.claim(request.id)
        self._waiting[request.id] = Waiting()

    def release(self, sequence_id: str) -> None:
        self._waiting.pop(sequence_id, None)
        super().release(sequence_id)

    def observe(self, outcome: Outcome) -> None:
        """Keep the features of what stayed; a prompt's go into the context at once."""
        forward = outcome.forward
        features = mx.concatenate([forward.features[tap] for tap in self.taps], axis=-1)
        for row, (name, tokens, kept) in enumerate(
            zip(forward.sequence_ids, outcome.tokens, outcome.kept, strict=True)
        ):
            if kept and (waiting := self._waiting.get(name)):
                waiting.add(forward.starts[row], features[row : row + 1, :kept])
                if kept >= EXTEND_AT_ONCE_TOKENS and waiting.stop < len(tokens):
                    self._catch_up({name: tokens})
                    mx.async_eval(self.runner.caches.arrays())

    def _refusal(self, row: DecodeRow, limit: int) -> str:
        waiting = self._waiting.get(row.sequence_id)
        if waiting is None:
            return "the drafter does not follow this request"
        if waiting.stop != len(row.tokens) - 1 or waiting.start == waiting.stop:
            return "the hidden states of the last tokens are still to come"
        return super()._refusal(row, limit)

    def _catch_up(self, known: Mapping[str, Sequence[int]]) -> mx.array:
        """Let the context take all waiting features, each with the token behind it."""
        behind, parts = [], []
        for name, tokens in known.items():
            waiting = self._waiting[name]
            self.runner.skip(name, waiting.start)
            behind.append(tokens[waiting.start + 1 : waiting.stop + 1])
            parts.append(waiting.take())
        widths = [len(tokens) for tokens in behind]
        parts = [mx.pad(part, [(0, 0), (0, max(widths) - part.shape[1]), (0, 0)]) for part in parts]
        return self._feed(list(known), self._inputs(padded(behind), self._module.fc(mx.concatenate(parts))), widths)

    def _inputs(self, tokens: mx.array, output: mx.array) -> mx.array:
        return mx.concatenate([self._embed(tokens), output], axis=-1)

    def _logits(self, output: mx.array) -> mx.array:
        return self._module.logits(output, self._target)

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        drawn = super()._draft(rows, sampled, width)
        for row in rows:
            self.runner.rewind(row.sequence_id, len(row.tokens) - 1)
        return drawn
