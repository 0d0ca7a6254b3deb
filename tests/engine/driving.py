"""A driver of an engine over random schedules, and the naive loop whose tokens every schedule must equal.

The naive loop is mlx-lm's own cache, one row, one token at a time, with `draw` for each token: no drafts, no batch, no
launch ahead, no rollback.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, make_prompt_cache

from app.core.reason import NO_REASON
from app.core.request import UNQUANTISED, Quantisation, Request, SamplingParameters
from app.core.step import DecodeRow, DecodeStep, EngineLimits, PrefillRow, PrefillStep
from app.engine.drafters.draft_model import DraftModel
from app.engine.drafters.drafter import Drafter, Proposal
from app.engine.drafters.features import FeatureDrafter
from app.engine.drafters.ngram import Ngram
from app.engine.drafters.registry import Drafters
from app.engine.engine import Engine
from app.engine.forward_results import SLOW_SECONDS
from app.engine.loaded_unit import Findings
from app.engine.prefix.cache import PrefixCache
from app.engine.prefix.disk import NO_DISK, Disk
from app.engine.probe import finished, probe
from app.engine.runner import Runner
from app.engine.sampling.drawing import SampledRow, adjust, draw
from app.models.draft_lengths import LONGEST_DRAFT
from app.models.footprint import SHARED_TOKENS


class Unpacked:
    """mlx-lm's own quantised cache, dequantised for attention: products with packed numbers round differently."""

    def __init__(self, bits: int) -> None:
        self.inner = QuantizedKVCache(group_size=32, bits=bits)
        self.make_mask = self.inner.make_mask

    @property
    def offset(self) -> int:
        return int(self.inner.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        kept = self.inner.update_and_fetch(keys, values)
        return tuple(mx.dequantize(*packed, group_size=32, bits=self.inner.bits) for packed in kept)


def quantised_caches(model: nn.Module, bits: int, kind: Callable[[int], Any] = Unpacked) -> list[Any]:
    """Return mlx-lm's caches of a model with heads of size 32; those that keep every token are quantised."""

    def turned(cache: Any) -> Any:
        if type(cache) is CacheList:
            return CacheList(*map(turned, cache.caches))
        return kind(bits) if type(cache) is KVCache and bits else cache

    return [turned(cache) for cache in make_prompt_cache(model)]


def naive(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParameters,
    cache: list[Any] | None = None,
) -> list[int]:
    """Return the `count` tokens that the naive loop generates."""
    cache = make_prompt_cache(model) if cache is None else cache
    tokens = list(prompt)
    for token in tokens[:-1]:
        mx.eval(model(mx.array([[token]]), cache=cache))
    for _ in range(count):
        logits = model(mx.array([[tokens[-1]]]), cache=cache).astype(mx.float32)
        row = [SampledRow(sampling, tokens, len(prompt))]
        tokens.append(int(draw(adjust(logits, row, None), row).item()))
    return tokens[len(prompt) :]


class Scripted(Drafter):
    """Drafter that knows the right continuation and spoils it after as many tokens as `script` returns."""

    name = "scripted"

    def __init__(self, truth: dict[str, list[int]], vocabulary: int, script: Callable[[int], int]) -> None:
        self.truth = truth
        self.vocabulary = vocabulary
        self.script = script
        self.cycle = 0

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        drafts, counts = [], []
        for row in rows:
            known = row.tokens[: row.prompt_length]
            whole = [*known, *self.truth[row.sequence_id]]
            wanted = whole[len(row.tokens) : len(row.tokens) + row.num_draft_tokens]
            right = self.script(self.cycle)
            self.cycle += 1
            spoiled = [token if place < right else (token + 1) % self.vocabulary for place, token in enumerate(wanted)]
            drafts.append(spoiled)
            counts.append(len(spoiled))
        width = max(counts)
        if width == 0:
            return Proposal.none((NO_REASON,) * len(rows))
        padded = [tokens + [0] * (width - len(tokens)) for tokens in drafts]
        return Proposal(mx.array(padded, dtype=mx.int32), tuple(counts), (NO_REASON,) * len(rows))


class Guided(Drafter):
    """Lets a feature drafter draft, then replaces its first drafts with as many right tokens as `script` returns."""

    def __init__(self, inner: FeatureDrafter, truth: dict[str, list[int]], script: Callable[[int], int]) -> None:
        self.inner, self.truth, self.script = inner, truth, script
        self.taps, self.runner = inner.taps, inner.runner
        self.admit, self.observe, self.release = inner.admit, inner.observe, inner.release  # type: ignore[method-assign]
        self.cycle = 0

    def propose(self, rows: Sequence[DecodeRow], sampled: Sequence[SampledRow]) -> Proposal:
        proposal = self.inner.propose(rows, sampled)
        if not proposal.width:
            return proposal
        drafts: Any = proposal.tokens.tolist()
        for index, (row, count) in enumerate(zip(rows, proposal.counts, strict=True)):
            if count:  # invariant: cached length of the drafter = that of the target = position of the last token
                assert self.inner.runner.length(row.sequence_id) == row.computed == len(row.tokens) - 1
            whole = [*row.tokens[: row.prompt_length], *self.truth[row.sequence_id]]
            right = whole[len(row.tokens) : len(row.tokens) + self.script(self.cycle)]
            self.cycle += 1
            drafts[index] = [*right, *drafts[index][len(right) :]][: len(drafts[index])]
        return Proposal(mx.array(drafts, dtype=mx.int32), proposal.counts, proposal.reasons)


_findings: dict[tuple[int, int, int, int], tuple[nn.Module, Findings]] = {}


def runner_of(model: nn.Module, margin_tokens: int, chunk_tokens: int, shared_tokens: int) -> Runner:
    """Return a runner with caches of these sizes. The first one of a model probes it; others reuse its findings."""
    sizes = {"margin_tokens": margin_tokens, "chunk_tokens": chunk_tokens, "shared_tokens": shared_tokens}
    key = (id(model), *sizes.values())
    if key not in _findings:
        _findings[key] = model, finished(probe(Runner(model, **sizes)))
    return Runner(model, findings=_findings[key][1], **sizes)


def build(
    target: nn.Module,
    *,
    draft: nn.Module | None = None,
    scripted: Scripted | None = None,
    features: Mapping[str, Drafter] | None = None,
    vocabulary: int = 97,
    margin_tokens: int = 24,
    chunk_tokens: int = 16,
    shared_tokens: int = SHARED_TOKENS,
    prefix_bytes: int = 0,
    max_rows: int = 8,
    carry_over: bool = False,
    max_context_tokens: int = 4096,
    disk: Disk = NO_DISK,
    slow_seconds: float = SLOW_SECONDS,
    quantisation: Quantisation = UNQUANTISED,
) -> Engine:
    """Return an engine for a tiny model. A small margin makes sliding windows wrap; `carry_over` disables recording."""
    runner = runner_of(target, margin_tokens, chunk_tokens, shared_tokens)
    if carry_over:
        runner.recordable = False
    runner.quantisation = quantisation
    available: dict[str, Drafter] = {**(features or {}), "ngram": Ngram()}
    if draft is not None:
        available["draft_model"] = DraftModel(
            runner_of(draft, margin_tokens, chunk_tokens, shared_tokens),
            target_vocabulary=vocabulary,
            max_context_tokens=max_context_tokens,
        )
    if scripted is not None:
        available["scripted"] = scripted
    limits = EngineLimits(
        max_context_tokens=max_context_tokens,
        max_rows=max_rows,
        prefill_chunk_tokens=chunk_tokens,
        drafters=tuple(available),
    )
    drafters = Drafters(available)
    runner.tap(drafters.taps)
    prefixes = PrefixCache(prefix_bytes, disk=disk, model_id="tiny")
    return Engine(runner, drafters, limits, prefixes, slow_seconds=slow_seconds)


@dataclass
class Live:
    """One sequence as a scheduler would track it."""

    request: Request
    tokens: list[int]
    computed: int = 0
    output_tokens: int = 0
    accepted: int = 0

    @property
    def done(self) -> bool:
        return self.output_tokens >= self.request.max_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt_tokens) :]


@dataclass
class Driver:
    """Runs random steps: prefill chunks, rows, draft lengths and methods. Its caller admits and cancels requests."""

    engine: Engine
    chance: random.Random
    methods: Sequence[str]
    """Methods, one at random for each row of a step; a request named after a method always uses that method."""
    longest_draft: int = 5
    chunk_tokens: int = 16
    ride_tokens: int = 1
    """Maximum number of uncached prompt tokens with which a request goes straight into a decode step."""
    live: dict[str, Live] = field(default_factory=dict)
    finished: dict[str, Live] = field(default_factory=dict)
    widest: int = 0
    """Largest number of rows in a step that verified drafts."""

    def admit(self, request: Request) -> None:
        if self.chance.random() < 0.5:
            self.engine.fetch(request)
        cached = self.engine.admit(request)
        assert 0 <= cached < len(request.prompt_tokens)
        self.live[request.id] = Live(request, list(request.prompt_tokens), cached)

    def leave(self, name: str) -> None:
        sequence = self.live.pop(name)
        self.engine.release(name, tuple(sequence.tokens[: sequence.computed]))
        self.finished[name] = sequence

    def step(self) -> None:
        prefilling = [
            s for s in self.live.values() if not s.output_tokens and len(s.tokens) - s.computed > self.ride_tokens
        ]
        decoding = [s for s in self.live.values() if s not in prefilling]
        if prefilling and (not decoding or self.chance.random() < 0.5):
            self._prefill(self.chance.sample(prefilling, self.chance.randint(1, len(prefilling))))
        elif decoding:
            self._decode(decoding)

    def _prefill(self, sequences: Sequence[Live]) -> None:
        rows = [
            PrefillRow(
                sequence.request.id,
                sequence.tokens,
                sequence.computed,
                min(len(sequence.tokens) - 1, sequence.computed + self.chance.randint(1, self.chunk_tokens)),
            )
            for sequence in sequences
        ]
        result = self.engine.step(PrefillStep(tuple(rows)))
        assert dict(result.prefilled) == {row.sequence_id: row.end for row in rows}
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.computed = row.end

    def _decode(self, decoding: Sequence[Live]) -> None:
        speculate = self.chance.random() < 0.7
        rows = [self._row(sequence, speculate=speculate) for sequence in decoding]
        result = self.engine.step(DecodeStep(tuple(rows)))
        if any(outcome.drafted for outcome in result.outcomes):
            self.widest = max(self.widest, len(rows))
        for outcome in result.outcomes:
            sequence = self.live[outcome.sequence_id]
            assert outcome.accepted <= outcome.drafted
            assert len(outcome.emitted) == outcome.accepted + 1
            sequence.tokens.extend(outcome.emitted)
            sequence.output_tokens += len(outcome.emitted)
            sequence.computed = outcome.computed
            sequence.accepted += outcome.accepted
            assert sequence.computed < len(sequence.tokens)
            if sequence.done:
                self.leave(outcome.sequence_id)

    def _row(self, sequence: Live, *, speculate: bool) -> DecodeRow:
        remaining = sequence.request.max_tokens - sequence.output_tokens
        wanted = self.chance.randint(0, self.longest_draft) if speculate else 0
        return DecodeRow(
            sequence_id=sequence.request.id,
            tokens=sequence.tokens,
            prompt_length=len(sequence.request.prompt_tokens),
            computed=sequence.computed,
            remaining=remaining,
            method=self.chance.choice(
                [method for method in self.methods if method == sequence.request.id] or self.methods
            ),
            num_draft_tokens=min(wanted, remaining - 1),
            max_draft_tokens=min(LONGEST_DRAFT, remaining - 1),
        )
