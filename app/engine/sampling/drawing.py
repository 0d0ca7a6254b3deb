"""From logits to tokens: one rule for every row, with noise keyed by (request seed, output position).

`x = argmax(logits + gumbel(key(seed, position)))` is a draw from softmax(logits) (the Gumbel-max trick); at temperature
0 it is argmax. The noise depends only on its key, so the text is the same alone or in a batch, with or without drafts,
and a drafter that draws with the same key often agrees with the target (arXiv 2408.07978). Each salt yields a noise
stream independent of the target's: rejection sampling has one for drafts and one for acceptances, and a constrained
answer has one to draw whether it begins with reasoning.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from app.core.request import SamplingParameters
from app.engine.memory import on_cpu
from app.engine.sampling.truncation import draw_kept, truncate

DRAFT_SALT = 0xA24BAED4963EE407
ACCEPTANCE_SALT = 0x9FB21C651E98DF25
OPENING_SALT = 0xD6E8FEB86659FD93
CACHED_LOGITS = 3 << 19
"""Number of logits that a CPU draws from at a time: the arrays (6 MB each) stay in its cache between passes."""
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class TokenCounts:
    """Counts of one row's accepted tokens, kept on the device: each step adds its new tokens; none is ever removed."""

    def __init__(self) -> None:
        self._counted = 0
        self._counts = mx.zeros((2, 0))

    def of(self, row: "SampledRow", vocabulary: int) -> tuple[mx.array, mx.array]:
        """Return each token's count in the prompt, and in the output known to the host, float32 [vocabulary] each."""
        if self._counts.shape[1] != vocabulary:
            self._counted, self._counts = 0, mx.zeros((2, vocabulary))
        if fresh := list(row.tokens[self._counted :]):
            columns = [
                int(position >= row.prompt_length) for position in range(self._counted, self._counted + len(fresh))
            ]
            self._counts = self._counts.at[mx.array(columns), mx.array(fresh)].add(1.0)
            self._counted += len(fresh)
        return self._counts[0], self._counts[1]


class SampledRow(NamedTuple):
    """Input for drawing one row's tokens: its parameters, its prompt and output so far, and its output position."""

    parameters: SamplingParameters
    tokens: Sequence[int]
    prompt_length: int
    pending: int = 0
    """Number of tokens drawn but not yet read by the host (one while a forward is launched ahead)."""
    salt: int = 0
    """Noise stream to draw with; 0 is the target's own."""
    counts: TokenCounts | None = None
    """Counts of a penalised row, kept from step to step; None: count from scratch."""

    @property
    def position(self) -> int:
        """Output position of the next token to draw."""
        return len(self.tokens) - self.prompt_length + self.pending


def noise_key(seed: int, position: int, salt: int = 0) -> tuple[int, int]:
    """Return two 32-bit words from splitmix64 (Steele, Lea, Flood 2014) of the seed, the output position and a salt."""
    value = (seed * _GOLDEN + (position + 1) * 0xD1B54A32D192ED03 & _MASK) ^ salt
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    value ^= value >> 31
    return value >> 32, value & 0xFFFFFFFF


def noise_keys(rows: Sequence[SampledRow], slots: int, *, salt: int = 0) -> mx.array:
    """Return keys uint32 [rows, slots, 2]; slot i belongs to output position `row.position + i`."""
    keys = [
        [noise_key(row.parameters.seed, position, row.salt ^ salt) for position in range(start, start + slots)]
        for row in rows
        for start in (row.position,)
    ]
    return mx.array(keys, dtype=mx.uint32)


def gumbel_noise(keys: mx.array, vocabulary: int) -> mx.array:
    """Return standard Gumbel noise float32 [rows, slots, vocabulary] for `keys` uint32 [rows, slots, 2]."""
    draw = mx.vmap(lambda key: mx.random.gumbel((vocabulary,), key=key))
    noise: mx.array = draw(keys.reshape(-1, 2))
    return noise.reshape(*keys.shape[:2], vocabulary)


def unit_noise(keys: mx.array) -> mx.array:
    """Return noise float32 [rows, slots], uniform in (0, 1] and never 0, for `keys` uint32 [rows, slots, 2]."""
    draw = mx.vmap(lambda key: mx.random.uniform(shape=(1,), key=key))
    below_one: mx.array = draw(keys.reshape(-1, 2))
    return 1.0 - below_one.reshape(keys.shape[:2])


def adjust(logits: mx.array, rows: Sequence[SampledRow], fed: mx.array | None) -> mx.array:
    """Apply logit bias and penalties at each slot, given the drafts before it.

    `logits` float32 [rows, slots, vocabulary]; `fed` int32 [rows, n] are tokens not in `row.tokens` yet, of which slot
    i of a row has seen the first `row.pending + i`.
    """
    if not any(_adjusts(row.parameters) for row in rows):
        return logits
    adjusted = []
    for index, row in enumerate(rows):
        row_logits = logits[index : index + 1]
        if _adjusts(row.parameters):
            row_logits = _adjust_row(row_logits[0], row, None if fed is None else fed[index])[None]
        adjusted.append(row_logits)
    return mx.concatenate(adjusted) if len(adjusted) > 1 else adjusted[0]


def _adjusts(parameters: SamplingParameters) -> bool:
    return bool(parameters.logit_bias) or penalises(parameters)


def penalises(parameters: SamplingParameters) -> bool:
    """Return whether the logits depend on the row's tokens."""
    return (
        parameters.repetition_penalty != 1.0
        or parameters.presence_penalty != 0.0
        or parameters.frequency_penalty != 0.0
    )


def _adjust_row(logits: mx.array, row: SampledRow, fed: mx.array | None) -> mx.array:
    parameters, vocabulary = row.parameters, logits.shape[-1]
    if penalises(parameters):
        logits = _penalised(logits, row, fed)
    # An id outside the vocabulary must never be an index: mlx does not check bounds.
    biases = {token: bias for token, bias in parameters.logit_bias.items() if 0 <= token < vocabulary}
    if biases:
        logits = logits.at[:, mx.array(list(biases))].add(mx.array(list(biases.values()), dtype=mx.float32))
    return logits


def _penalised(logits: mx.array, row: SampledRow, fed: mx.array | None) -> mx.array:
    """Penalise all tokens by the host's counts, then redo those in `fed`, which slots have seen more often."""
    prompt, output = (row.counts or TokenCounts()).of(row, logits.shape[-1])
    penalised = _penalise(logits, prompt, output, row.parameters)
    ids = None if fed is None else fed[: row.pending + len(logits) - 1]
    if ids is None or not len(ids):
        return penalised
    is_visible = mx.arange(len(ids)) < row.pending + mx.arange(len(logits))[:, None]
    extra = mx.sum((ids[:, None] == ids) & is_visible[:, None], axis=-1)
    indices = mx.broadcast_to(ids, is_visible.shape)
    values = mx.take_along_axis(logits, indices, axis=-1)
    values = _penalise(values, prompt[ids], output[ids] + extra, row.parameters)
    return mx.put_along_axis(penalised, indices, values, axis=-1)


def _penalise(logits: mx.array, prompt: mx.array, output: mx.array, parameters: SamplingParameters) -> mx.array:
    """Apply penalties in vLLM's order: repetition (prompt and output), then frequency and presence (output only)."""
    if parameters.repetition_penalty != 1.0:
        scale = mx.where(prompt + output > 0, parameters.repetition_penalty, 1.0)
        logits = mx.where(logits > 0, logits / scale, logits * scale)
    return logits - (parameters.frequency_penalty * output + parameters.presence_penalty * (output > 0))


def noise_ahead(rows: Sequence[SampledRow], slots: int, vocabulary: int) -> Sequence[mx.array | None]:
    """Return the noise of the next `slots` draws, float32 [rows, 1, vocabulary] each, made together to save launches.
    None where `draw` makes its own: for all-greedy rows, and on a CPU, where the noise of one draw fills the cache."""
    if on_cpu() or not any(row.parameters.temperature > 0 for row in rows):
        return [None] * slots
    noise = gumbel_noise(noise_keys(rows, slots), vocabulary)
    return [noise[:, slot : slot + 1] for slot in range(slots)]


def draw(logits: mx.array, rows: Sequence[SampledRow], noise: mx.array | None = None) -> mx.array:
    """Draw int32 [rows, slots], one token for every slot of `logits` float32 [rows, slots, vocabulary], with `noise` of
    the same shape as `logits` if it was made ahead."""
    greedy = mx.argmax(logits, axis=-1).astype(mx.int32)
    is_sampled = [row.parameters.temperature > 0 for row in rows]
    if not any(is_sampled):
        return greedy
    slots, vocabulary = logits.shape[1:]
    rows_per_group = max(1, CACHED_LOGITS // (slots * vocabulary)) if on_cpu() else len(rows)
    groups = [slice(start, start + rows_per_group) for start in range(0, len(rows), rows_per_group)]
    drawn = mx.concatenate(
        [_sampled(logits[group], rows[group], noise if noise is None else noise[group]) for group in groups]
    )
    if all(is_sampled):
        return drawn
    return mx.where(mx.array(is_sampled)[:, None], drawn, greedy)


def _sampled(logits: mx.array, rows: Sequence[SampledRow], noise: mx.array | None) -> mx.array:
    if noise is None:
        noise = gumbel_noise(noise_keys(rows, logits.shape[1]), logits.shape[2])
    return draw_kept(_scaled(logits, rows), noise, [row.parameters for row in rows])


def shape_logits(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    """Apply temperature and truncation to `logits` float32 [rows, slots, vocabulary]; rows draw from their softmax.
    Rows at temperature 0 are not scaled: the caller takes their argmax."""
    return truncate(_scaled(logits, rows), [row.parameters for row in rows])


def _scaled(logits: mx.array, rows: Sequence[SampledRow]) -> mx.array:
    temperature = [
        max(requested, 1e-6) if requested > 0 else 1.0 for requested in (row.parameters.temperature for row in rows)
    ]
    if set(temperature) == {1.0}:
        return logits
    return logits / mx.array(temperature, dtype=mx.float32)[:, None, None]
