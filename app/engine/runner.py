"""One model with its caches: forwards over chosen rows, then a commit that says how much of them stays.

Every forward is a transaction: the lengths move only in `commit`, so what was written and not kept is never read.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from app.engine.lanes import Selection, SlotTable
from app.engine.layers import Taps
from app.engine.recording import Recording, attach, recording, replay
from app.engine.rollback import MARGIN_TOKENS, Caches, UnknownCacheError, make_caches

StateRow = tuple[tuple[mx.array, ...], ...]
"""The recurrent states of one row, by layer."""


def padded(rows: Sequence[Sequence[int]], width: int = 0) -> mx.array:
    """int32 [rows, width] of token ids; `width` is at least the longest row's."""
    width = max(width, *(len(row) for row in rows))
    return mx.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=mx.int32)


def last_of(values: mx.array, widths: Sequence[int]) -> mx.array:
    """[rows, 1, size]: of `values` [rows, width, size] what stands at the last real place of each row."""
    if values.shape[1] == 1:
        return values
    return mx.take_along_axis(values, mx.array(list(widths), dtype=mx.int32)[:, None, None] - 1, axis=1)


@dataclass(frozen=True)
class Forward:
    """A launched forward: where each row lies in it and how many tokens each was really fed."""

    selection: Selection
    sequence_ids: tuple[str, ...]
    widths: tuple[int, ...]
    record: Recording
    features: Mapping[int, mx.array] = field(default_factory=dict)
    """Tap → hidden states [rows, width, hidden], in the order of `sequence_ids`."""
    starts: tuple[int, ...] = ()
    """Cached length of each row before this forward."""


class Runner:
    """Runs one model over slot caches. All calls come from the MLX thread.

    A drafter that reads hidden states is no model that mlx-lm knows: `probe` False trusts the caches it asks for.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        margin_tokens: int = MARGIN_TOKENS,
        chunk_tokens: int = 512,
        probe: bool = True,
    ) -> None:
        self.model: Any = model
        self.caches: Caches = make_caches(model, margin_tokens=margin_tokens, chunk_tokens=chunk_tokens)
        self.recordable = bool(self.caches.states) and attach(model)
        self.gapped: set[str] = set()
        """Sequences whose rows lack positions before their last one."""
        self._taps = Taps(model, ())
        if probe:
            self._probe()

    def _probe(self) -> None:
        """Compare a few tokens with mlx-lm's own caches. Raises UnknownCacheError when the model needs more of them."""
        tokens = mx.array([[1, 2, 3, 4, 5, 6]])
        original = make_prompt_cache(self.model)
        spans = ((0, 3), (3, 5), (5, 6))
        wanted = [self.model(tokens[:, start:stop], cache=original) for start, stop in spans]
        self.claim("probe")
        try:
            got = []
            for start, stop in spans:
                logits, forward = self.forward(["probe"], tokens[:, start:stop], [stop - start])
                got.append(logits)
                self.commit(forward, [stop - start])
            first, second = mx.concatenate(wanted, axis=1), mx.concatenate(got, axis=1)
            scale = mx.maximum(mx.max(mx.abs(first)), 1.0)
            distance = float(mx.max(mx.abs(first - second)) / scale)
        except (AttributeError, TypeError, ValueError, AssertionError) as error:
            raise UnknownCacheError(f"the model reaches into its caches ({error})") from error
        finally:
            self.release("probe")
        if not distance < 5e-2:
            raise UnknownCacheError(f"slot caches change the model's answer by {distance:.3g}")

    def tap(self, layer_ids: Sequence[int]) -> None:
        """Let every forward from now on hand over the output of these layers."""
        self._taps = Taps(self.model, layer_ids)

    @property
    def rows(self) -> Mapping[str, int]:
        """The slot of each sequence."""
        return self.caches.table.slots

    @property
    def exact(self) -> bool:
        """Whether a row can only be put back where a copy was taken: not at every token, as attention layers can."""
        return bool(self.caches.states) or any(window is not None for window in self.caches.lanes)

    def claim(self, sequence_id: str) -> None:
        self.caches.table.claim(sequence_id)

    def claim_once(self, sequence_id: str) -> None:
        """Claim a row unless the sequence has one."""
        if sequence_id not in self.caches.table.slots:
            self.claim(sequence_id)

    def release(self, sequence_id: str) -> None:
        self.gapped.discard(sequence_id)
        if sequence_id in self.caches.table.slots:
            self.caches.release(sequence_id)

    def length(self, sequence_id: str) -> int:
        return self.caches.table.length(sequence_id)

    def ordered(self, sequence_ids: Sequence[str]) -> list[str]:
        """The ids in slot order, the order in which rows lie in a forward."""
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
        """Feed int32 `tokens` [rows, width]; logits [rows, width, vocabulary] come back lazily, in the same order.

        `sequence_ids` are in slot order. With `record`, recurrent scans are kept for a partial commit. `call` runs
        instead of the model (another verb of a drafter's module) and is fed whatever rows it wants.
        """
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
        with recording() if record and self.recordable else nullcontext(Recording()) as kept:
            logits = (call or self.model)(tokens, cache=self.caches.layers)
        features = self._taps.take()
        if inert:
            logits = logits[mx.array(slots)]
            features = {tap: hidden[mx.array(slots)] for tap, hidden in features.items()}
        starts = tuple(selection.lengths[slot] for slot in slots)
        return logits, Forward(selection, tuple(sequence_ids), tuple(widths), kept, features, starts)

    def commit(self, forward: Forward, keep: Sequence[int]) -> list[int]:
        """Keep the first `keep[row]` tokens of each row. The answer is what was kept: 0 where tokens are carried over.

        Rows of attention layers just get their new length. Recurrent states that hold too much are scanned again
        from the recording; without one they go back to before the forward, and so does the row.
        """
        selection, table = forward.selection, self.caches.table
        kept = list(keep)
        if self.caches.states:
            kept = self._commit_states(forward, kept)
        for name, size in zip(forward.sequence_ids, kept, strict=True):
            slot = table.slots[name]
            table.lengths[slot] = selection.lengths[slot - selection.first] + size
        return kept

    def _commit_states(self, forward: Forward, keep: list[int]) -> list[int]:
        selection, record, states = forward.selection, forward.record, self.caches.states
        partly = tuple(keep) != forward.widths
        again = partly and len(record.scans) == len(record.convolutions) == len(states)
        if partly and not again:
            keep = [size if size == width else 0 for size, width in zip(keep, forward.widths, strict=True)]
        padded_keep = [0] * (selection.stop - selection.first)
        for name, size in zip(forward.sequence_ids, keep, strict=True):
            padded_keep[self.caches.table.slots[name] - selection.first] = size
        live = [size > 0 for size in padded_keep]
        for layer, state in enumerate(states):
            fed = [array for array in state.cache if array is not None]
            state.commit(selection, live, replay(record, layer, padded_keep) if again else fed)
        return keep

    def skip(self, sequence_id: str, length: int) -> None:
        """Go on at position `length` although nothing is cached for the positions before it: they are not seen."""
        table = self.caches.table
        slot = table.slots[sequence_id]
        if length > table.lengths[slot]:
            self.gapped.add(sequence_id)
        for lane in self.caches.lanes.values():
            lane.set_base(slot, lane.base(slot) + length - table.lengths[slot])
        table.lengths[slot] = length

    def rewind(self, sequence_id: str, length: int) -> None:
        """Forget the row's tokens from `length` on; recurrent states stay as they are until `restore_rows`."""
        table = self.caches.table
        slot = table.slots[sequence_id]
        table.lengths[slot] = min(table.lengths[slot], length)

    def clear(self) -> None:
        """Drop every row and buffer."""
        for name in list(self.caches.table.slots):
            self.release(name)

    def arrays(self) -> list[Any]:
        """All that its caches hold."""
        return self.caches.arrays()

    def state_row(self, sequence_id: str) -> StateRow:
        """A copy of the row's recurrent states."""
        slot = self.caches.table.slots[sequence_id]
        return tuple(state.read_row(slot) for state in self.caches.states)

    def state_rows(self) -> list[tuple[mx.array, ...]]:
        """References to all recurrent states, by layer: a free snapshot."""
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


class AloneRunner(Runner):
    """Of a model whose caches no family covers: its own ones, one sequence at a time, and every token fed stays."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.caches = Caches(table=SlotTable(), layers=[])

    def claim(self, sequence_id: str) -> None:
        """Raises RuntimeError when the one row is taken."""
        if self.caches.table.slots:
            raise RuntimeError("this model decodes one request at a time")
        self.caches.table.claim(sequence_id)
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
        self.caches.table.lengths[0] += keep[0]
        return list(keep)
