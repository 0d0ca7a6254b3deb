"""Base of drafters that read the target's hidden states (features): modules, their loading, and pending features.

A row's features are pending until they enter the drafter's context. Features of a prompt enter chunk by chunk, those of
decode steps with the next proposal or, without drafts, once `MAX_PENDING_TOKENS` are pending. Positions that the
prefix cache restored without features leave a gap in the context; tokens after the gap keep their positions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from app.core.errors import ModelUnavailable
from app.core.reason import NO_REASON, Reason
from app.core.request import Request
from app.core.step import DecodeRow
from app.engine.caches.lanes import reservation
from app.engine.drafters.draft_model import DraftModel
from app.engine.drafters.drafter import Drafter, Observation
from app.engine.layers import Target
from app.engine.loaded_unit import LoadedUnit
from app.engine.runner import Runner, padded
from app.engine.sampling.drawing import SampledRow
from app.models.drafters.config import DrafterConfig
from app.models.folder import ModelFolder

MAX_PENDING_TOKENS = 512
"""Maximum number of pending features of a row, in tokens; then they are fed to the drafter together. If they were
dropped instead, no later request could reuse the drafter's cache of the text."""
EXTEND_AT_ONCE_TOKENS = 32


class FeatureModule(nn.Module):
    """One attention layer over the target's embeddings and hidden states, with the target's head, unless a subclass
    differs. `extend(inputs, cache)` extends the context; `fc` projects features [rows, width, taps · target hidden] to
    the module's hidden size."""

    config: Any
    longest: int

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc: Any = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=False)

    def fill(self, weights: Mapping[str, mx.array]) -> Self:
        """Load exactly these weights. Raises ModelUnavailable if they do not match the module."""
        try:
            return self.load_weights(list(weights.items()), strict=True)
        except ValueError as error:
            detail = " ".join(str(error).split())[:200]
            raise ModelUnavailable(f"its tensors are not those of its config ({detail}); download it again") from error

    def make_cache(self) -> list[Any]:
        """Return the caches of the layers, as mlx-lm's models do."""
        return [KVCache()]

    def logits(self, hidden: mx.array, target: Target) -> mx.array:
        """Return float32 logits [rows, width, vocabulary] over the target's tokens."""
        return target.logits(hidden)


class Attention(qwen3.Attention):
    """Qwen3's attention over inputs of `input_size`, with the biases and rotary positions of the config."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__(config)
        size, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(input_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(input_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)
        rotary_size, scaling = int(size * config.partial_rotary_factor), dict(config.rope_scaling or {}) or None
        self.rope = initialize_rope(
            rotary_size, config.rope_theta, config.rope_traditional, scaling, config.max_position_embeddings
        )

    def extend(self, x: mx.array, cache: Any) -> None:
        """Append keys and values of `x` [rows, width, input] to the cache."""
        shape = (*x.shape[:2], self.n_kv_heads, -1)
        keys = self.k_norm(self.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
        cache.update_and_fetch(self.rope(keys, offset=cache.offset), values)


def load_tensors(folder: ModelFolder, *borrowed: str) -> dict[str, mx.array]:
    """Load a folder's tensors lazily, by name without a leading `model.`; skip names with a `borrowed` prefix."""
    files: list[Any] = [mx.load(str(folder.path / name)) for name in folder.weight_files]
    tensors = {name.removeprefix("model."): value for file in files for name, value in file.items()}
    return {name: value for name, value in tensors.items() if not name.startswith(borrowed)}


class PendingFeatures:
    """Features of one row that are not in the drafter's context yet: consecutive positions `start` … `stop` - 1."""

    def __init__(self) -> None:
        self.start = self.stop = 0
        self._parts: list[tuple[list[mx.array], int]] = []

    def add(self, start: int, taps: Sequence[mx.array], row: int, count: int) -> None:
        """Add the features of `count` positions from `start` on, lazily: row `row` of each tap [rows, width, size].
        Features before a gap are dropped."""
        if start != self.stop:
            self._parts, self.start = [], start
        self._parts.append(([tap[row : row + 1, :count] for tap in taps], count))
        self.stop = start + count

    def take(self, stop: int) -> mx.array:
        """Remove and return the features before position `stop`, [1, n, taps · size]."""
        whole = mx.concatenate([mx.concatenate(taps, axis=-1) for taps, _ in self._parts], axis=1)
        count = stop - self.start
        self._parts = [([whole[:, count:]], self.stop - stop)] if stop < self.stop else []
        self.start = stop
        return whole[:, :count]

    def last(self) -> mx.array:
        """Return the features of the last position, [1, 1, taps · size], without removing them."""
        return mx.concatenate(self._parts[-1][0], axis=-1)[:, -1:]


def _ready_count(pending: PendingFeatures, tokens: Sequence[int]) -> int:
    """Return how many of the pending features have a known next token."""
    return min(pending.stop, len(tokens) - 1) - pending.start


class FeatureDrafter(DraftModel):
    """A draft model that is a `FeatureModule`: the target's hidden states extend its context.

    Unless a subclass differs, it reads pairs (token, hidden state at the previous position); for its own drafts, the
    hidden state is its own too. Entries written while drafting are rolled back immediately; accepted tokens enter again
    with the target's features (EAGLE, arXiv 2401.15077 and 2503.01840).
    """

    def __init__(self, runner: Runner, target: Target) -> None:
        self._module: FeatureModule = runner.model
        self._target = target
        context, vocabulary = self._module.config.max_position_embeddings, target.vocabulary_size
        super().__init__(runner, target_vocabulary=vocabulary, max_context_tokens=context)
        self.taps, self.longest = self._module.config.taps, self._module.longest
        self._embed = self._module.get("embed_tokens", target.embed)
        self._pending: dict[str, PendingFeatures] = {}

    @classmethod
    def open(cls, unit: LoadedUnit) -> Drafter:
        draft = unit.drafter(cls.name)
        target = Target(unit.target, unit.config, unit.vocabulary_size)
        chunk_tokens, on_progress = unit.spec.prefill_chunk_tokens, unit.on_progress
        return cls(Runner(draft.model, chunk_tokens=chunk_tokens, on_progress=on_progress), target)

    def admit(self, request: Request) -> None:
        self.runner.claim(request.id, reservation(len(request.prompt_tokens), request.max_tokens))
        self._pending[request.id] = PendingFeatures()

    def release(self, sequence_id: str) -> None:
        self._pending.pop(sequence_id, None)
        super().release(sequence_id)

    def observe(self, observation: Observation) -> None:
        """Queue the features of committed tokens; those of a prompt's chunk enter the context immediately."""
        forward = observation.forward
        taps = [forward.features[tap] for tap in self.taps]
        for row, name in enumerate(forward.sequence_ids):
            tokens, committed, pending = observation.tokens[row], observation.committed[row], self._pending.get(name)
            if pending is not None and committed:
                pending.add(forward.starts[row], taps, row, committed)
                threshold = EXTEND_AT_ONCE_TOKENS if committed >= EXTEND_AT_ONCE_TOKENS else MAX_PENDING_TOKENS
                if pending.stop - pending.start >= threshold:  # the last position stays pending: drafts begin with it
                    self.commit(name, tokens[: pending.stop])

    def commit(self, sequence_id: str, tokens: Sequence[int]) -> None:
        """Extend the context by pending features whose next token is known."""
        if _ready_count(self._pending[sequence_id], tokens) > 0:
            self._catch_up({sequence_id: tokens})
            mx.async_eval(self.runner.caches.arrays())

    def pending_features(self, sequence_id: str, length: int) -> mx.array | None:
        pending = self._pending[sequence_id]
        return pending.last() if pending.start < pending.stop == length else None

    def resume(self, sequence_id: str, length: int, features: mx.array | None) -> None:
        pending = self._pending[sequence_id]
        pending.start = pending.stop = length
        if features is not None and self.runner.length(sequence_id) == length - 1:
            pending.start = pending.stop = length - 1
            pending.add(length - 1, [features], 0, 1)

    def _refusal(self, row: DecodeRow) -> Reason:
        pending = self._pending.get(row.sequence_id)
        if pending is None:
            return Reason("drafter_unread")
        if pending.stop != len(row.tokens) - 1 or pending.start == pending.stop:
            return Reason("drafter_waits")
        return NO_REASON

    def _catch_up(self, tokens_by_id: Mapping[str, Sequence[int]]) -> mx.array:
        """Extend the context by all pending features whose next token is known, each together with that token."""
        next_tokens, parts = [], []
        for name, tokens in tokens_by_id.items():
            pending = self._pending[name]
            self.runner.skip(name, pending.start)
            stop = pending.start + _ready_count(pending, tokens)
            next_tokens.append(tokens[pending.start + 1 : stop + 1])
            parts.append(pending.take(stop))
        widths = [len(tokens) for tokens in next_tokens]
        parts = [mx.pad(part, [(0, 0), (0, max(widths) - part.shape[1]), (0, 0)]) for part in parts]
        return self._feed(
            list(tokens_by_id), self._inputs(padded(next_tokens), self._module.fc(mx.concatenate(parts))), widths
        )

    def _inputs(self, tokens: mx.array, output: mx.array) -> mx.array:
        return mx.concatenate([self._embed(tokens), output], axis=-1)

    def _logits(self, output: mx.array) -> mx.array:
        return self._module.logits(output, self._target)

    def _draft(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow], width: int) -> tuple[mx.array, mx.array]:
        drawn = super()._draft(rows, sampled, width)
        for row in rows:
            self.runner.rewind(row.sequence_id, len(row.tokens) - 1)
        return drawn
