"""Runs one model over its caches: a forward over chosen rows, then a commit of how many tokens to keep.

Every forward is a transaction: lengths change only in `commit`, so what was written but not committed is never read.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.core.request import UNQUANTISED, Quantisation
from app.engine.caches.attention import attach as attach_attention
from app.engine.caches.attention import attend_for, packed_queries_for
from app.engine.caches.lanes import Selection, SlotTable
from app.engine.caches.recording import Recording, attach, recording
from app.engine.caches.rollback import MARGIN_TOKENS, Caches, UnknownCacheError, make_caches
from app.engine.layers import Taps
from app.engine.memory import gpu_architecture
from app.models.footprint import SHARED_TOKENS

PROBE = (((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (5, 6, 8, 9, 10)), ((21, 22, 23, 24, 25, 26), (0, 4, 5, 6, 6)))
"""Tokens of each probe row, and how many have been fed after each forward: one row runs alone, another one joins with
more tokens, both continue, and one runs alone again."""
PROBE_REJECTS: tuple[tuple[int, ...], ...] = ((), (9,), (), (), ())
"""Drafts fed in addition to the first row in each of these forwards, then rejected."""

PER_BUFFER_PROBE_SECONDS = 4.0
"""Processor seconds of a probe after which rows in buffers of their own are not probed: on so slow a machine padding
hardly matters, and the model loads in half the time."""

LARGEST_ERROR, LARGEST_HALF_ERROR = 0.01, 0.15
"""Tolerated relative error of logits in float32 and in half precision: kernels change with the number of rows and
tokens, and deep models and routers amplify that; broken families are off by 0.27 to 1.2."""
INTERFERING_IN_LONG_CONTEXTS = frozenset({"mlx_lm.models.minimax_m3_vl"})
"""Modules whose rows disturb one another only in contexts longer than the probe: this one picks blocks of keys by
position from the longest row's end."""

SPLIT_DEPENDENT = {"mlx_lm.models.phi3small": "mlx-lm lets its tokens see later ones of the same forward"}
"""Modules whose answers depend on how tokens are split into forwards, and why."""

StateRow = tuple[tuple[mx.array, ...], ...]
"""Recurrent states, by layer."""


def padded(rows: Sequence[Sequence[int]], width: int = 0) -> mx.array:
    """Return token ids as int32 [rows, width]; `width` is at least the longest row's."""
    width = max(width, *(len(row) for row in rows))
    return mx.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=mx.int32)


def last_of(values: mx.array, widths: Sequence[int]) -> mx.array:
    """Return [rows, 1, size]: `values` [rows, width, size] at the last real position of each row."""
    if values.shape[1] == 1:
        return values
    return mx.take_along_axis(values, mx.array(list(widths), dtype=mx.int32)[:, None, None] - 1, axis=1)


@dataclass(frozen=True)
class Forward:
    """A launched forward: the position of each row in it and how many real tokens each was fed."""

    selection: Selection
    sequence_ids: tuple[str, ...]
    widths: tuple[int, ...]
    record: Recording
    features: Mapping[int, mx.array] = field(default_factory=dict)
    """Tap → hidden states [rows, width, hidden], in the order of `sequence_ids`."""
    starts: tuple[int, ...] = ()
    """Cached length of each row before this forward."""
    states: StateRow = ()
    """Recurrent states of all rows, by layer, if everything fed is committed."""
    parts: "tuple[Forward, ...]" = ()
    """One forward for each row, where rows ran separately."""


class Runner:
    """Runs one model over slot caches. All calls come from the MLX thread.

    `probe` False trusts the caches a model asks for: mlx-lm cannot run a drafter that reads hidden states.
    `on_progress` is called between the parts of a long step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        margin_tokens: int = MARGIN_TOKENS,
        chunk_tokens: int = 512,
        shared_tokens: int = SHARED_TOKENS,
        probe: bool = True,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.model: Any = model
        self.on_progress = on_progress
        self.caches: Caches = make_caches(
            model, margin_tokens=margin_tokens, chunk_tokens=chunk_tokens, shared_tokens=shared_tokens
        )
        attach_attention(model)
        self.caches.table.attend = attend_for(gpu_architecture())
        self.caches.table.packed_queries = packed_queries_for(gpu_architecture())
        self.quantisation: Quantisation = UNQUANTISED
        """Quantisation of rows, applied as requests are admitted."""
        self.recordable = bool(self.caches.states) and attach(model)
        self.gapped: set[str] = set()
        """Sequences whose rows lack positions before their last one."""
        self.rows_isolated = False
        """Whether rows disturb one another in this model, so that each runs separately."""
        self._taps = Taps(model, ())
        if probe:
            self._probe()

    def _probe(self) -> None:
        """Compare two rows of uneven widths, and what follows a rejected draft, with mlx-lm's own forward of each row.

        If they disagree, rows run separately or accepted tokens are carried over. Raises UnknownCacheError if even a
        row on its own gets a different answer.
        """
        if reason := SPLIT_DEPENDENT.get(type(self.model).__module__, ""):
            raise UnknownCacheError(reason)
        started, expected = time.process_time(), []
        for tokens, _ in PROBE:
            expected.append(self.model(mx.array([tokens]), cache=make_prompt_cache(self.model))[0])
            self._wait(expected[-1])
        isolation_modes = (True,) if type(self.model).__module__ in INTERFERING_IN_LONG_CONTEXTS else (False, True)
        recordings = (True, False) if self.recordable else (False,)
        for self.rows_isolated, self.recordable in product(isolation_modes, recordings):
            reason = self._mismatch(expected)
            if not reason:
                if time.process_time() - started < PER_BUFFER_PROBE_SECONDS:
                    self._probe_per_buffer(expected)
                return
        raise UnknownCacheError(reason)

    def _probe_per_buffer(self, expected: Sequence[mx.array]) -> None:
        """Find out whether attention may be called once per buffer; else keys and values are padded into one array."""
        if not self.rows_isolated:
            self.caches.table.attends_per_buffer = True
            self.caches.table.attends_per_buffer = not self._mismatch(expected, separate_buffers=True)

    def _mismatch(self, expected: Sequence[mx.array], *, separate_buffers: bool = False) -> str:
        """Return how the probe's rows differ from `expected`, logits [tokens, vocabulary] of each; "" if they do not.
        `separate_buffers` puts the rows into buffers of their own."""
        names = [f"probe {row}" for row in range(len(PROBE))]
        for name in names:
            self.claim(name)
        for name in names if separate_buffers else ():
            self.caches.separate(name)
        actual = [logits[:0] for logits in expected]
        try:
            for step, rejected in enumerate(PROBE_REJECTS):
                lengths = [self.length(name) for name in names]
                fed = [tokens[start : ends[step]] for start, (tokens, ends) in zip(lengths, PROBE, strict=True)]
                rows = sorted((row for row, tokens in enumerate(fed) if tokens), key=lambda row: self.rows[names[row]])
                keep = [len(fed[row]) for row in rows]
                fed[0] = (*fed[0], *rejected)
                widths = [len(fed[row]) for row in rows]
                sequence_ids = [names[row] for row in rows]
                logits, forward = self.forward(
                    sequence_ids, padded([fed[row] for row in rows]), widths, record=bool(rejected)
                )
                for index, row in enumerate(rows):
                    actual[row] = mx.concatenate([actual[row][: lengths[row]], logits[index, : keep[index]]])
                self.commit(forward, keep)
                self._wait(logits)
            distance = max(_distance(batched, alone) for batched, alone in zip(actual, expected, strict=True))
        except (AttributeError, TypeError, ValueError, LookupError, NotImplementedError, AssertionError) as error:
            return f"the model reaches into its caches ({error})"
        finally:
            for name in reversed(names):
                self.release(name)
        limit = LARGEST_ERROR if logits.dtype == mx.float32 else LARGEST_HALF_ERROR
        return "" if distance < limit else f"slot caches change the model's answer by {distance:.3g}"

    def _wait(self, logits: mx.array) -> None:
        """Compute one forward of the probe, which takes seconds on a slow device, and report progress."""
        mx.eval(logits)
        self.on_progress()

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Make every forward from now on return the output of these layers."""
        self._taps = Taps(self.model, layer_ids)

    @property
    def rows(self) -> Mapping[str, int]:
        """The slot of each sequence."""
        return self.caches.table.slots

    @property
    def needs_snapshots(self) -> bool:
        """Whether a row can be restored only where a copy was taken, not at every token as in attention layers."""
        return bool(self.caches.states) or any(window is not None for window in self.caches.lanes)

    def claim(self, sequence_id: str, reserve_tokens: int = 0, bits: int = 0) -> None:
        """Claim a row with room for `reserve_tokens` from its first forward on.
        With `bits`, keys and values are quantised as they are written, each token on its own."""
        self.caches.claim(sequence_id, reserve_tokens, bits)

    def separate_long_rows(self) -> None:
        """Give rows that have become long buffers of their own; call it between steps."""
        for sequence_id in self.caches.table.outgrown:
            self.caches.separate(sequence_id)

    def claim_once(self, sequence_id: str, reserve_tokens: int = 0) -> None:
        """Claim a row unless the sequence has one."""
        if sequence_id not in self.caches.table.slots:
            self.claim(sequence_id, reserve_tokens)

    def release(self, sequence_id: str) -> None:
        self.gapped.discard(sequence_id)
        if sequence_id in self.caches.table.slots:
            self.caches.release(sequence_id)

    def length(self, sequence_id: str) -> int:
        return self.caches.table.length(sequence_id)

    def ordered(self, sequence_ids: Sequence[str]) -> list[str]:
        """Return the ids in slot order, the order of rows in a forward."""
        return sorted(sequence_ids, key=self.caches.table.slots.__getitem__)

    def forward(
        self,
        sequence_ids: Sequence[str],
        tokens: mx.array,
        widths: Sequence[int],
        *,
        record: bool = False,
        call: Callable[..., mx.array] | None = None,
    ) -> tuple[mx.array, Forward]:
        """Feed int32 `tokens` [rows, width]; return lazy logits [rows, width, vocabulary] and the forward.

        `sequence_ids` and all arrays are in slot order. `record` keeps recurrent scans for a partial commit. `call`
        runs in place of the model (another method of a drafter's module), on inputs of whatever shape it takes.
        """
        if self.rows_isolated and len(sequence_ids) > 1:
            return self._forward_isolated(sequence_ids, tokens, widths, record=record)
        selection = self.caches.table.select(sequence_ids, tokens.shape[1])
        rows = selection.stop - selection.first
        slots = [self.caches.table.slots[name] - selection.first for name in sequence_ids]
        inert = rows != len(slots)
        padded_widths = [0] * rows
        for slot, width in zip(slots, widths, strict=True):
            padded_widths[slot] = width
        if inert:
            source = [0] * rows
            for index, slot in enumerate(slots):
                source[slot] = index
            tokens = tokens[mx.array(source)]
        for state in self.caches.states:
            state.begin(selection, padded_widths)
        with self._scan_recording(padded_widths, selection.width, record=record) as recorded:
            logits = (call or self.model)(tokens, cache=self.caches.layers)
        features = self._taps.take()
        if inert:
            logits = logits[mx.array(slots)]
            features = {tap: hidden[mx.array(slots)] for tap, hidden in features.items()}
        starts = tuple(selection.lengths[slot] for slot in slots)
        states = tuple(state.fed() for state in self.caches.states)
        return logits, Forward(selection, tuple(sequence_ids), tuple(widths), recorded, features, starts, states)

    def _scan_recording(self, widths: Sequence[int], width: int, *, record: bool) -> AbstractContextManager[Recording]:
        """Return the context for the model's call, which gives its scans the rows' `widths` and may record them."""
        records = record and self.recordable
        is_ragged = bool(self.caches.states) and any(size != width for size in widths)
        if not (records or is_ragged):
            return nullcontext(Recording())
        return recording(records=records, lengths=mx.array(list(widths), dtype=mx.int32) if is_ragged else None)

    def _forward_isolated(
        self, sequence_ids: Sequence[str], tokens: mx.array, widths: Sequence[int], *, record: bool
    ) -> tuple[mx.array, Forward]:
        """Run one row after the other; their outputs are padded to one rectangle."""
        rows = enumerate(zip(sequence_ids, widths, strict=True))
        ran = [
            self.forward([name], tokens[row : row + 1, :width], [width], record=record) for row, (name, width) in rows
        ]
        parts = tuple(forward for _, forward in ran)

        def pad_together(arrays: Sequence[mx.array]) -> mx.array:
            padding = [tokens.shape[1] - array.shape[1] for array in arrays]
            return mx.concatenate(
                [mx.pad(array, [(0, 0), (0, size), (0, 0)]) for array, size in zip(arrays, padding, strict=True)]
            )

        features = {tap: pad_together([part.features[tap] for part in parts]) for tap in parts[0].features}
        starts = tuple(part.starts[0] for part in parts)
        selection = self.caches.table.select(sequence_ids, tokens.shape[1])
        whole = Forward(selection, tuple(sequence_ids), tuple(widths), Recording(), features, starts, parts=parts)
        return pad_together([logits for logits, _ in ran]), whole

    def commit(self, forward: Forward, keep: Sequence[int]) -> list[int]:
        """Commit the first `keep[row]` tokens of each row; return the counts committed, 0 where tokens carry over.

        Rows of attention layers just get their new length. Recurrent states that went too far are scanned again from
        the recording; without one, they and the row return to before the forward.
        """
        if forward.parts:
            return [self.commit(part, [size])[0] for part, size in zip(forward.parts, keep, strict=True)]
        selection, table = forward.selection, self.caches.table
        committed = list(keep)
        if self.caches.states:
            committed = self._commit_states(forward, committed)
        for name, size in zip(forward.sequence_ids, committed, strict=True):
            table.set_length(name, selection.lengths[table.slots[name] - selection.first] + size)
        return committed

    def _commit_states(self, forward: Forward, keep: list[int]) -> list[int]:
        selection, record, states = forward.selection, forward.record, self.caches.states
        arrays = [len(fed) for fed in forward.states]
        is_partial = tuple(keep) != forward.widths
        replays = is_partial and record.fits(arrays)
        if is_partial and not replays:
            keep = [size if size == width else 0 for size, width in zip(keep, forward.widths, strict=True)]
        padded_keep = [0] * (selection.stop - selection.first)
        for name, size in zip(forward.sequence_ids, keep, strict=True):
            padded_keep[self.caches.table.slots[name] - selection.first] = size
        live = [size > 0 for size in padded_keep]
        committed = record.replay(arrays, padded_keep) if replays else forward.states
        for state, new_states in zip(states, committed, strict=True):
            state.commit(selection, live, new_states)
        return keep

    def skip(self, sequence_id: str, length: int) -> None:
        """Continue at position `length`, leaving a gap: positions without cached entries are not attended to."""
        table = self.caches.table
        slot, gap = table.slots[sequence_id], length - table.length(sequence_id)
        if gap > 0:
            self.gapped.add(sequence_id)
        for lane in self.caches.lanes.values():
            lane.set_base(slot, lane.base(slot) + gap)
        table.set_length(sequence_id, length)

    def rewind(self, sequence_id: str, length: int) -> None:
        """Drop the row's tokens from `length` on; recurrent states are unchanged until `restore_rows`."""
        table = self.caches.table
        table.set_length(sequence_id, min(table.length(sequence_id), length))

    def clear(self) -> None:
        """Drop every row and buffer."""
        for name in list(self.caches.table.slots):
            self.release(name)

    def arrays(self) -> list[Any]:
        """Return all arrays in its caches."""
        return self.caches.arrays()

    def state_row(self, sequence_id: str) -> StateRow:
        """Copy the row's recurrent states."""
        slot = self.caches.table.slots[sequence_id]
        return tuple(state.read_row(slot) for state in self.caches.states)

    def state_rows(self) -> list[tuple[mx.array, ...]]:
        """Return references to all recurrent states, by layer: a free snapshot."""
        return [state.store for state in self.caches.states]

    def restore_rows(self, snapshots: Sequence[Sequence[tuple[mx.array, ...]]], choice: Mapping[int, int]) -> None:
        """Give each slot the states of the snapshot that `choice` names for it."""
        for layer, state in enumerate(self.caches.states):
            stores = [snapshot[layer] for snapshot in snapshots]
            chosen = [stores[choice[slot]] if slot in choice else state.store for slot in range(len(state.store[0]))]
            state.store = tuple(
                mx.concatenate([rows[index][slot : slot + 1] for slot, rows in enumerate(chosen)])
                for index in range(len(state.store))
            )


def _distance(batched: mx.array, alone: mx.array) -> float:
    """Return the relative error of logits [tokens, vocabulary] at the worst token, a norm, so that no outlier decides.
    Equal infinities, and an offset common to all logits, count as no difference."""
    finite = mx.isfinite(alone)
    error, size = (mx.where(finite, logits, 0.0).astype(mx.float32) for logits in (batched - alone, alone))
    error, size = (values - mx.mean(values, axis=-1, keepdims=True) for values in (error, size))
    ratios = mx.linalg.norm(error, axis=-1) / mx.maximum(mx.linalg.norm(size, axis=-1), 1e-6)
    return float("inf") if bool(mx.any(finite != mx.isfinite(batched))) else float(mx.max(ratios))


class AloneRunner(Runner):
    """Runner for a model with unsupported caches: its own ones, one sequence at a time, all fed tokens committed."""

    def __init__(self, model: nn.Module, on_progress: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.on_progress = on_progress
        self.caches = Caches(table=SlotTable(), layers=[])
        self.rows_isolated = False
        self.quantisation = UNQUANTISED

    def claim(self, sequence_id: str, reserve_tokens: int = 0, bits: int = 0) -> None:
        """Claim the only row. Raises RuntimeError if it is taken."""
        if self.caches.table.slots:
            raise RuntimeError("this model decodes one request at a time")
        self.caches.table.claim(sequence_id, reserve_tokens, bits)
        self.caches.layers = make_prompt_cache(self.model)

    def release(self, sequence_id: str) -> None:
        if sequence_id in self.caches.table.slots:
            self.caches.table.release(sequence_id)
            self.caches.layers = []

    def arrays(self) -> list[Any]:
        return [layer.state for layer in self.caches.layers]

    def forward(
        self,
        sequence_ids: Sequence[str],
        tokens: mx.array,
        widths: Sequence[int],
        *,
        record: bool = False,
        call: Callable[..., mx.array] | None = None,
    ) -> tuple[mx.array, Forward]:
        if record:
            raise RuntimeError("this model cannot verify drafts: its cache cannot be rewound")
        selection = self.caches.table.select(sequence_ids, tokens.shape[1])
        logits: Any = (call or self.model)(tokens, cache=self.caches.layers)
        return logits, Forward(selection, tuple(sequence_ids), tuple(widths), Recording(), starts=selection.lengths)

    def commit(self, forward: Forward, keep: Sequence[int]) -> list[int]:
        if tuple(keep) != forward.widths:
            raise RuntimeError("this model's cache cannot be rewound")
        (name,) = forward.sequence_ids
        self.caches.table.set_length(name, forward.starts[0] + keep[0])
        return list(keep)
