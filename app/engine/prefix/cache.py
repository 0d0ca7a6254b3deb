"""Prefix cache: computed prompts, kept in blocks (`index.py`) for later requests of the same owner.

There are two tiers, memory and disk (`disk.py`, which survives restarts), and two verbs, `restore` and `store`.
Attention layers keep every token, so a row can be restored up to any token that two texts share. Recurrent states and
sliding windows can be restored only where a state piece was taken: at a prompt's checkpoints, where prefill stops, and
at the end of an output. Each drafter with a model of its own has its own chains.

Owners never share entries: the number of cached tokens and the response time would leak what another owner said.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from app.core.request import Request
from app.core.step import PrefixState
from app.core.unit import ModelSpecification
from app.engine.caches.lanes import reservation
from app.engine.caches.rollback import copied
from app.engine.drafters import Drafter
from app.engine.memory import on_cpu
from app.engine.prefix.disk import NO_DISK, Content, Disk, DiskFile, identity_of, model_folder_name
from app.engine.prefix.index import (
    BLOCK_TOKENS,
    PIECE_BYTES,
    ROWS,
    SHORTEST_TOKENS,
    STATE,
    Name,
    Piece,
    Shelf,
    Trail,
    chained,
    root,
    states_within,
    walk,
)
from app.engine.runner import Runner

SHARE = 0.5
"""Share of the memory left by models that the cache uses if no size was set; the rest is for future rows."""
NEAR_TOKENS = 16
"""Distance in tokens after a checkpoint within which a prompt's end gets none: rereading is cheaper than a copy."""
UNBOUND_BYTES = 1 << 30
"""Limit in bytes until `bound` is called."""
FETCH_SECONDS = 0.005
"""Longest wait, in seconds, for files that are read ahead, before others step again."""
CLOSE_SECONDS = 0.2
"""Longest wait, in seconds, for pending writes when a model leaves memory: their memory is free then, but others wait
with it."""
Arrays = dict[str, mx.array]


@dataclass(frozen=True)
class Line:
    """A prompt's cached chain from `start` on, for one model."""

    runner: Runner
    start: bytes
    path: Trail


class PrefixCache:
    """Prefix cache of one model. A hit yields the same tokens as a miss, and drafts just as well.

    `most_bytes` None means a share of the memory that models leave. `identity` stands for the model's files and all
    that its caches depend on, `drafters` for the same of each drafter, by method: files of any other identity never
    match.
    """

    def __init__(
        self,
        most_bytes: int | None,
        *,
        disk: Disk = NO_DISK,
        model_id: str = "",
        identity: str = "",
        drafters: Mapping[str, str] | None = None,
    ) -> None:
        self.most_bytes = most_bytes
        self.disk = disk
        self.found_tokens = {"memory": 0, "disk": 0}
        """Tokens restored so far, by tier."""
        self._folder = model_folder_name(model_id, identity)
        self._identity = identity
        self._drafters = drafters or {}
        self._memory: Shelf[Arrays] = Shelf(UNBOUND_BYTES if most_bytes is None else most_bytes)
        self._ahead_of, self._ahead = "", dict[Name, Content]()
        """Request whose files are read ahead, and their contents."""

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def state(self) -> PrefixState:
        """Bytes on disk for this model, tokens restored by tier, and why nothing is being written."""
        return PrefixState(self.disk.bytes_of(self._folder), dict(self.found_tokens), self.disk.trouble)

    @property
    def limit_bytes(self) -> int:
        return self._memory.limit_bytes

    @property
    def _shelves(self) -> tuple[Shelf[Arrays], Shelf[DiskFile]]:
        return self._memory, self.disk.shelf

    # --- restoring --------------------------------------------------------------------------------------------

    def restore(self, request: Request, target: Runner, drafters: Mapping[str, Drafter]) -> int:
        """Restore the longest usable prefix into the request's rows; return its length, always < that of the prompt.

        A prefix that a feature-reading drafter did not follow is a miss: it could never read the missing features and
        would draft badly.
        """
        if not self.limit_bytes:
            return 0
        contents = None
        while contents is None:  # a file may vanish in between: retry without it
            lines, length = self._reusable(request, target, drafters)
            if not length:
                return 0
            contents = self._contents(lines, length)
        self.drop_fetched(request.id)
        for name, (kept, arrays) in contents.items():
            if kept:
                lines[name].runner.claim_once(request.id, reservation(len(request.prompt_tokens), request.max_tokens))
                _put(lines[name].runner, request.id, kept, arrays)
        for name, drafter in drafters.items():
            if drafter.taps:
                drafter.resume(request.id, length, contents[""][1][-1].get(f"features {name}"))
        return length

    def fetch(self, request: Request, target: Runner, drafters: Mapping[str, Drafter]) -> bool:
        """Begin to read the files that `restore` would use, in other threads; return whether they are read.
        Waits for at most `FETCH_SECONDS`."""
        if not self.limit_bytes:
            return True
        if self._ahead_of != request.id:
            lines, length = self._reusable(request, target, drafters)
            pieces = [piece for name in lines for piece in self._pieces(lines, name, length)[1]] if length else []
            reads = {piece.name: self.disk.read_ahead(piece) for piece in pieces if piece.name not in self._memory}
            self._ahead_of = request.id
            self._ahead = {name: content for name, content in reads.items() if content is not None}
        return not wait(self._ahead.values(), FETCH_SECONDS).not_done

    def drop_fetched(self, request_id: str) -> None:
        """Drop what was read ahead for a request."""
        if self._ahead_of == request_id:
            self._ahead_of, self._ahead = "", {}

    def _reusable(
        self, request: Request, target: Runner, drafters: Mapping[str, Drafter]
    ) -> tuple[dict[str, Line], int]:
        """Return the lines of a prompt and the length to restore; 0 if it is not worth it."""
        self.disk.collect()
        lines = self._lines(request, target, drafters)
        length = self._agreed(lines[""], [lines[name] for name, drafter in drafters.items() if drafter.taps])
        return lines, length if length >= SHORTEST_TOKENS else 0

    def _lines(self, request: Request, target: Runner, drafters: Mapping[str, Drafter]) -> dict[str, Line]:
        """Return the line of each model by method; the target's has the empty name."""
        tokens = request.prompt_tokens
        models = {"": target} | {
            name: drafter.runner for name, drafter in drafters.items() if drafter.runner is not None
        }
        lines = {}
        for name, runner in models.items():
            shift = int(bool(name and drafters[name].taps))
            start = self._start(request, target, name, tokens[:shift])
            lines[name] = Line(runner, start, walk(self._shelves, start, tokens[shift : len(tokens) - 1 + shift]))
        return lines

    def _start(self, request: Request, target: Runner, name: str, first: Sequence[int]) -> bytes:
        """Return the root key of an owner's chains for a model, one for each quantisation of the target's row.
        A feature drafter's entry for a token depends on the next token too, so its chain is keyed by the tokens shifted
        by one, and `first` seeds the root."""
        bits = target.quantisation.bits_of(len(request.prompt_tokens))
        form = [f"{bits}-bit"] if bits else []
        start = root(self._identity, request.owner, self._drafters.get(name, name), *form)
        return chained(start, first) if first else start

    def _usable(self, line: Line, limit: int) -> int:
        """Return how many of the first `limit` positions can be restored."""
        if not line.runner.needs_snapshots:
            return min(limit, line.path.shared)
        states = states_within(self._shelves, line.path, line.start, limit)
        return next((length for length, _ in states), 0)

    def _agreed(self, target: Line, bound: Sequence[Line]) -> int:
        """Return the longest prefix that the target and all `bound` drafters can restore.
        Drafters may lag by one position where the target's state holds its features."""
        length = self._usable(target, target.path.shared)
        while length:
            lag = int(target.runner.needs_snapshots)
            reach = min((self._usable(line, length) + lag for line in bound), default=length)
            if reach >= length:
                return length
            length = self._usable(target, reach)
        return 0

    def _contents(self, lines: Mapping[str, Line], length: int) -> dict[str, tuple[int, list[Arrays]]] | None:
        """Return each line's positions to restore and their arrays, marked as used; None if a piece was lost."""
        contents = {}
        tokens = dict.fromkeys(self.found_tokens, 0)
        for name in lines:
            kept, pieces = self._pieces(lines, name, length)
            arrays: list[Arrays] = []
            for piece in pieces:
                tier = "memory" if piece.name in self._memory else "disk"
                held = self._memory.get(piece.name) if tier == "memory" else self._load(piece)
                if held is None:
                    return None
                arrays.append(held)
                tokens[tier] += len(piece.tokens) if piece.kind == ROWS and not name else 0
            contents[name] = kept, arrays
            for piece in reversed(pieces):
                self._memory.use(piece.name)
            self.disk.used([piece.name for piece in reversed(pieces)])
        for tier, count in tokens.items():
            self.found_tokens[tier] += count
        return contents

    def _pieces(self, lines: Mapping[str, Line], name: str, length: int) -> tuple[int, list[Piece]]:
        """Return how many of `length` positions one line restores, and the pieces that hold them."""
        line = lines[name]
        kept = self._usable(line, length) if name else length
        pieces = list(line.path.pieces[: -(-kept // BLOCK_TOKENS)])
        if line.runner.needs_snapshots and kept:
            pieces.append(next(states_within(self._shelves, line.path, line.start, kept))[1])
        return kept, pieces

    def _load(self, piece: Piece) -> Arrays | None:
        """Load a piece from disk into memory."""
        arrays = self.disk.read(piece, self._ahead.pop(piece.name, None))
        if arrays is not None:
            self._keep(piece, arrays)
        return arrays

    # --- storing ----------------------------------------------------------------------------------------------

    def keeps(self, length: int) -> bool:
        """Return whether a prefix of `length` is worth storing, including what drafters must read for it."""
        return length >= SHORTEST_TOKENS and self.limit_bytes > 0

    def store(
        self, request: Request, text: Sequence[int], length: int, target: Runner, drafters: Mapping[str, Drafter]
    ) -> None:
        """Store the first `length` positions of the target's row, and of the drafters' rows as far as they reach.

        `text` holds the tokens known of the row. Pieces already stored cost nothing, new ones a single wait for the
        device. On an error, such as mlx running out of memory, the memory tier is cleared and the error raised.
        """
        whole = tuple(text)
        self.disk.collect()
        carried: Arrays = {}
        offered: dict[Piece, Arrays] = {}
        for name, drafter in drafters.items():
            if drafter.runner is not None and request.id in drafter.runner.rows:
                shift = int(bool(drafter.taps))
                followed = whole[shift : min(length, drafter.runner.length(request.id)) + shift]
                start = self._start(request, target, name, whole[:shift])
                self._store(start, followed, drafter.runner, request.id, offered)
                features = drafter.pending(request.id, length)
                carried |= {f"features {name}": features} if features is not None else {}
        self._store(self._start(request, target, "", ()), whole[:length], target, request.id, offered, carried)
        try:
            mx.eval([array for arrays in offered.values() for array in arrays.values()])
        except BaseException:
            self.clear()
            raise
        for piece, arrays in offered.items():
            self.disk.write(self._folder, piece, arrays)

    def _store(
        self,
        start: bytes,
        tokens: tuple[int, ...],
        runner: Runner,
        request_id: str,
        offered: dict[Piece, Arrays],
        carried: Mapping[str, mx.array] | None = None,
    ) -> None:
        """Store one model's chain from `start`; `carried` joins the state, and kept pieces join `offered`, for disk."""
        if (
            not tokens
            or request_id in runner.gapped
            or (runner.needs_snapshots and runner.length(request_id) != len(tokens))
        ):
            return
        parent, taken = start, 0
        pieces: list[Piece] = []
        for begin in range(0, len(tokens), BLOCK_TOKENS):
            pieces.append(Piece.of(ROWS, parent, tokens[begin : begin + BLOCK_TOKENS]))
            span = begin, begin + len(pieces[-1].tokens)
            nbytes = self._offer(pieces[-1], partial(_rows, runner, request_id, *span), taken, offered)
            if nbytes is None:  # the rest does not fit
                break
            parent, taken = pieces[-1].key, taken + nbytes
        else:
            if runner.needs_snapshots:
                state = Piece.of(STATE, pieces[-1].parent, pieces[-1].tokens)
                take = partial(_state, runner, request_id, len(tokens), carried or {})
                self._offer(state, take, taken, offered)
        for piece in reversed(pieces):
            self._memory.use(piece.name)

    def _offer(self, piece: Piece, take: Callable[[], Arrays], taken: int, offered: dict[Piece, Arrays]) -> int | None:
        """Keep a piece unless present; return its bytes, or None if it does not fit beside `taken` bytes of its own."""
        held = self._memory.get(piece.name)
        if held is None and self._covered(piece):
            return 0
        arrays = take() if held is None else held
        nbytes = PIECE_BYTES + sum(array.nbytes for array in arrays.values())
        if taken + nbytes > self.limit_bytes:
            return None
        if held is None:
            self._keep(piece, arrays)
        self._memory.use(piece.name)
        offered[piece] = arrays
        return nbytes

    def _covered(self, piece: Piece) -> bool:
        """Return whether a longer piece begins with it."""
        if piece.kind != ROWS or len(piece.tokens) == BLOCK_TOKENS:
            return False
        others = self._memory.followers(ROWS, piece.parent, piece.tokens[0])
        return any(other.tokens[: len(piece.tokens)] == piece.tokens for other in others)

    def _keep(self, piece: Piece, arrays: Arrays) -> None:
        nbytes = PIECE_BYTES + sum(array.nbytes for array in arrays.values())
        self._memory.make_room(nbytes)
        if nbytes <= self.limit_bytes:
            self._memory.add(piece, arrays, nbytes)

    # --- limits -----------------------------------------------------------------------------------------------

    def bound(self, left_bytes: int) -> None:
        """Limit memory to the configured size, or else a share of `left_bytes`, and never to more than `left_bytes`."""
        self.disk.collect()  # frees the memory of what was written for models that have left
        self._memory.limit_bytes = min(
            left_bytes, int(left_bytes * SHARE) if self.most_bytes is None else self.most_bytes
        )
        self._memory.make_room(0)

    def trim(self, kept_share: float) -> None:
        """Shrink the memory tier to this share of its bytes, least recently used first; the disk tier is untouched."""
        self._memory.make_room(self.limit_bytes - int(self.nbytes * kept_share))

    def clear(self) -> None:
        """Clear the memory tier; the disk tier is untouched."""
        self._memory.clear()
        self._ahead_of, self._ahead = "", {}

    def close(self) -> None:
        """Clear the memory tier once pending writes to disk are done, or after `CLOSE_SECONDS`."""
        self.disk.flush(CLOSE_SECONDS)
        self.clear()


def checkpoints_of(request: Request) -> set[int]:
    """Return where rows that cannot be cut are copied: at checkpoints and, unless one is near, at the prompt's end."""
    end = len(request.prompt_tokens) - 1
    near = any(end - NEAR_TOKENS <= place <= end for place in request.checkpoints)
    return {*request.checkpoints} | (set() if near else {end})


def open_prefix_cache(spec: ModelSpecification, disk: Disk) -> PrefixCache:
    """Open the prefix cache of a loaded unit."""
    if disk is NO_DISK:
        return PrefixCache(spec.prefix_cache_bytes)
    return PrefixCache(
        spec.prefix_cache_bytes,
        disk=disk,
        model_id=spec.id,
        identity=identity_of(Path(spec.path), f"float32={on_cpu()}"),
        drafters={draft.method: identity_of(Path(draft.path), draft.method) for draft in spec.drafts},
    )


def _rows(runner: Runner, request_id: str, begin: int, stop: int) -> Arrays:
    """Copy these positions of every layer that keeps all positions, by layer and part."""
    caches = runner.caches
    spans = caches.read_span(request_id, begin, stop)
    return {
        f"{layer} {part}": copied(array)
        for layer, (cache, span) in enumerate(zip(caches.kv, spans, strict=True))
        if cache.lane.window is None
        for part, array in enumerate(span)
    }


def _state(runner: Runner, request_id: str, length: int, carried: Mapping[str, mx.array]) -> Arrays:
    """Copy what layers know only here: recurrent states, and the part of each window that the next token sees."""
    caches, arrays = runner.caches, dict(carried)
    for layer, cache in enumerate(caches.kv):
        if (window := cache.lane.window) is not None:
            span = caches.read_span(request_id, max(0, length - window + 1), length)[layer]
            arrays |= {f"{layer} {part}": copied(array) for part, array in enumerate(span)}
    for layer, state in enumerate(runner.state_row(request_id)):
        arrays |= {f"state {layer} {part}": array for part, array in enumerate(state)}
    return arrays


def _put(runner: Runner, request_id: str, length: int, pieces: Sequence[Arrays]) -> None:
    """Fill an empty row with `length` positions."""
    caches = runner.caches
    spans = []
    for layer, cache in enumerate(caches.kv):
        parts = list(_parts(pieces, str(layer)))
        whole = tuple(mx.concatenate(part, axis=2) if len(part) > 1 else part[0] for part in parts)
        spans.append(whole if cache.lane.window is not None else tuple(array[:, :, :length] for array in whole))
    caches.write_span(request_id, 0, spans, stop=length)
    for layer, state in enumerate(caches.states):
        state.write_row(caches.table.slots[request_id], [part[0] for part in _parts(pieces, f"state {layer}")])


def _parts(pieces: Sequence[Arrays], name: str) -> Iterator[list[mx.array]]:
    """Yield the keys, the values, or each array of a state, as the list of its parts in the order of `pieces`."""
    part = 0
    while arrays := [piece[f"{name} {part}"] for piece in pieces if f"{name} {part}" in piece]:
        yield arrays
        part += 1
