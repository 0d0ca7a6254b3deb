"""Runs one model over its caches: a forward over chosen rows, then a commit of the tokens to keep.

Every forward is a transaction: only `commit` adds tokens to a row, so what was written but not committed is never read.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from app.core.request import UNQUANTISED, Quantisation
from app.engine.caches.attention import attach as attach_attention
from app.engine.caches.attention import attend_for, packed_queries_for
from app.engine.caches.lanes import Selection, SlotTable
from app.engine.caches.recording import Recording, attach, recording
from app.engine.caches.rollback import MARGIN_TOKENS, Caches, UnknownCacheError, make_caches
from app.engine.layers import Taps
from app.engine.loaded_unit import Findings
from app.engine.memory import gpu_architecture
from app.models.footprint import SHARED_TOKENS

StateRow = tuple[tuple[mx.array, ...], ...]
"""Recurrent states, by layer."""


def padded(rows: Sequence[Sequence[int]], width: int = 0) -> mx.array:
    """Return token ids as int32 [rows, at least `width`], each row padded with 0 on the right."""
    width = max(width, *(len(row) for row in rows))
    return mx.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=mx.int32)


def last_of(values: mx.array, widths: Sequence[int]) -> mx.array:
    """Return [rows, 1, size]: `values` [rows, width, size] at the last real position of each row."""
    if values.shape[1] == 1:
        return values
    return mx.take_along_axis(values, mx.array(list(widths), dtype=mx.int32)[:, None, None] - 1, axis=1)


@dataclass(frozen=True)
class Forward:
    """A forward to be committed: the rows in it, and how many real tokens each was fed (`widths`)."""

    selection: Selection
    sequence_ids: tuple[str, ...]
    widths: tuple[int, ...]
    record: Recording
    features: Mapping[int, mx.array] = field(default_factory=dict)
    """Tap → hidden states [rows, width, hidden], in the order of `sequence_ids`."""
    starts: tuple[int, ...] = ()
    """Cached length of each row before this forward."""
    states: StateRow = ()
    """Recurrent states of all selected slots after everything that was fed, by layer."""
    parts: "tuple[Forward, ...]" = ()
    """One forward for each row, where rows ran separately."""


@dataclass(frozen=True)
class RewindPoint:
    """The `length` of a row, and copies of the state that truncation cannot restore: base, keys and values of each
    layer with a window, and recurrent states."""

    length: int
    windows: Mapping[int, tuple[int, mx.array, mx.array]]
    states: StateRow


class Runner:
    """Runs one model over slot caches. All calls come from the MLX thread.

    `findings` come from a probe of this model (`probe.py`). Feature drafters have none, because mlx-lm cannot run them
    for comparison: the caches that they ask for are trusted.
    `on_progress` is called between the parts of a long step. Raises UnknownCacheError if the model cannot use slot
    caches.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        margin_tokens: int = MARGIN_TOKENS,
        chunk_tokens: int = 512,
        shared_tokens: int = SHARED_TOKENS,
        findings: Findings | None = None,
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
        """Quantisation of keys and values, decided for each row when its request is admitted."""
        self.recordable = bool(self.caches.states) and attach(model)
        self.gapped: set[str] = set()
        """Ids of sequences whose rows lack some positions before the last."""
        self.rows_isolated = False
        """Whether rows disturb one another in this model, so that each runs separately."""
        self._taps = Taps(model, ())
        if findings is not None:
            if findings.error:
                raise UnknownCacheError(findings.error)
            self.rows_isolated, self.recordable = findings.rows_isolated, findings.recordable
            self.caches.table.attends_per_buffer = findings.attends_per_buffer

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

    @property
    def cache_bytes(self) -> int:
        """Bytes of all rows' caches."""
        return self.caches.nbytes

    def claim(self, sequence_id: str, reserve_tokens: int = 0, bits: int = 0) -> None:
        """Claim a row; its first forward makes room for `reserve_tokens`.
        With `bits`, keys and values are quantised as they are written, each token separately."""
        self.caches.claim(sequence_id, reserve_tokens, bits)

    def separate_long_rows(self) -> None:
        """Move rows that are too long for the shared buffers to buffers of their own. Call it between steps."""
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

        `sequence_ids` and all arrays are in slot order. `record` keeps recurrent scans for a partial commit. `call`,
        such as another method of a drafter's module, runs in place of the model; `tokens` are then its inputs.
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
        states = tuple(state.after() for state in self.caches.states)
        return logits, Forward(selection, tuple(sequence_ids), tuple(widths), recorded, features, starts, states)

    def _scan_recording(self, widths: Sequence[int], width: int, *, record: bool) -> AbstractContextManager[Recording]:
        """Return the context in which to call the model: it gives scans the rows' `widths`, and may record them."""
        records = record and self.recordable
        is_ragged = bool(self.caches.states) and any(size != width for size in widths)
        if not (records or is_ragged):
            return nullcontext(Recording())
        return recording(records=records, lengths=mx.array(list(widths), dtype=mx.int32) if is_ragged else None)

    def _forward_isolated(
        self, sequence_ids: Sequence[str], tokens: mx.array, widths: Sequence[int], *, record: bool
    ) -> tuple[mx.array, Forward]:
        """Run the rows one after another, and pad their outputs to one rectangle."""
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

        Attention layers need only the new length. Recurrent states that went too far are recomputed from the recorded
        scans. Without a recording, the row returns to before the forward, and its kept tokens must be fed again.
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
        arrays = [len(states_after) for states_after in forward.states]
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
        """Continue the row at position `length`: nothing attends to the positions of the gap before it."""
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

    def rewind_point(self, sequence_id: str) -> RewindPoint:
        """Return an evaluated copy of what `return_to` needs."""
        slot, length, windows = self.rows[sequence_id], self.length(sequence_id), {}
        for layer, cache in enumerate(self.caches.kv):
            if cache.lane.window is not None:
                base = cache.lane.base(slot)
                keys, values = cache.read_span(slot, base, length)
                windows[layer] = base, mx.contiguous(keys), mx.contiguous(values)
        point = RewindPoint(length, windows, self.state_row(sequence_id))
        mx.eval([array for _, *arrays in windows.values() for array in arrays], point.states)
        return point

    def return_to(self, sequence_id: str, point: RewindPoint) -> None:
        """Give the row the length, windows and states that it had at `point`."""
        slot = self.rows[sequence_id]
        self.rewind(sequence_id, point.length)
        for layer, (base, keys, values) in point.windows.items():
            self.caches.kv[layer].lane.set_base(slot, base)
            self.caches.kv[layer].write_row(slot, (keys, values))
        for state, arrays in zip(self.caches.states, point.states, strict=True):
            state.write_row(slot, arrays)

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
        """Give each slot in `choice` its states in the snapshot of that index; other slots keep theirs."""
        for layer, state in enumerate(self.caches.states):
            stores = [snapshot[layer] for snapshot in snapshots]
            chosen = [stores[choice[slot]] if slot in choice else state.store for slot in range(len(state.store[0]))]
            state.store = tuple(
                mx.concatenate([rows[index][slot : slot + 1] for slot, rows in enumerate(chosen)])
                for index in range(len(state.store))
            )


class AloneRunner(Runner):
    """Runner for a model with unsupported caches: it uses the model's own caches for one sequence at a time, and
    commits every token."""

    def __init__(self, model: nn.Module, on_progress: Callable[[], None] = lambda: None) -> None:
        self.model = model
        self.on_progress = on_progress
        self.caches = Caches(table=SlotTable(), layers=[])
        self.rows_isolated = False
        self.quantisation = UNQUANTISED

    @property
    def cache_bytes(self) -> int:
        has_run = any(self.caches.table.length(name) for name in self.caches.table.slots)
        leaves = tree_flatten(self.arrays(), destination={}) if has_run else {}
        return sum(array.nbytes for array in dict(leaves).values() if isinstance(array, mx.array))

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
