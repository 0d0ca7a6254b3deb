"""Records the inputs of recurrent layers during a verify forward, so that a rollback reruns only their scans.

mlx-lm's recurrent layers call an `nn.Conv1d` and one of the module-level functions in `SCANS`. `attach` wraps both
once; nothing is kept unless a recording is open. Rerunning a scan on recorded inputs needs no matrix product (an idea
from z-lab's MLX code for DFlash). A layer's cache has one state per convolution and scan, in the order they run in.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import mlx.core as mx
from mlx import nn


class Inputs(NamedTuple):
    """Names of a scan's arguments with one entry per token, their token axis, and the name of the state argument."""

    tokens: tuple[str, ...]
    axis: int
    state: str


SCANS: Mapping[str, Inputs] = {
    "gated_delta_update": Inputs(("q", "k", "v", "a", "b"), 1, "state"),
    "ssm_update": Inputs(("hidden_states", "B", "C", "dt"), 1, "state"),
    "recurrent_gla": Inputs(("q", "k", "v"), 2, "h"),
}


@dataclass(frozen=True)
class Convolution:
    """Recorded input of a convolution, `fed` [rows, kernel - 1 + width, channels]."""

    fed: mx.array
    kernel: int

    def after(self, keep: Sequence[int]) -> mx.array:
        """Return the state [rows, kernel - 1, channels] after the first `keep[row]` fed tokens of each row."""
        positions = mx.array(list(keep), dtype=mx.int32)[:, None] + mx.arange(self.kernel - 1, dtype=mx.int32)
        return mx.take_along_axis(self.fed, positions[..., None], axis=1)


@dataclass(frozen=True)
class Scan:
    """A recorded call of one of the `SCANS`, with arguments by name; `parameters` are the names that it accepts."""

    run: Callable[..., Any]
    parameters: AbstractSet[str]
    inputs: Inputs
    arguments: Mapping[str, Any]

    def after(self, keep: Sequence[int]) -> mx.array:
        """Return the state [rows, …] after the first `keep[row]` fed tokens of each row.

        A single row needs no mask: its inputs are cut to length. Several rows are masked if the scan accepts a mask
        (`ssm_update` also needs `lengths`), else cut one by one.
        """
        if len(keep) == 1:
            return self._cut(0, keep[0])
        if "mask" not in self.parameters:
            return mx.concatenate([self._cut(row, size) for row, size in enumerate(keep)])
        starts = mx.array(list(keep), dtype=mx.int32)
        width = self.arguments[self.inputs.tokens[0]].shape[self.inputs.axis]
        masked = {"mask": mx.arange(width) < starts[:, None]}
        if "lengths" in self.parameters:
            masked["lengths"] = starts
        state: mx.array = self.run(**{**self.arguments, **masked})[1]
        return state

    def _cut(self, row: int, size: int) -> mx.array:
        """Return the state [1, …] of one row after `size` tokens."""
        arguments, state = dict(self.arguments), self.arguments.get(self.inputs.state)
        if state is not None:
            arguments[self.inputs.state] = state = state[row : row + 1]
        if size == 0:
            return mx.zeros_like(self._cut(row, 1)) if state is None else state
        index = (slice(row, row + 1), *[slice(None)] * (self.inputs.axis - 1), slice(size))
        for name in arguments.keys() & set(self.inputs.tokens):
            arguments[name] = arguments[name][index]
        for name in arguments.keys() & {"mask", "lengths"}:
            arguments[name] = None
        scanned: mx.array = self.run(**arguments)[1]
        return scanned


@dataclass
class Recording:
    """Convolutions and scans of one forward, in the order in which they ran; none unless `records`."""

    open: ClassVar["Recording | None"] = None
    """Recording of the forward in progress; a class variable because only the MLX thread runs models."""
    records: bool = False
    lengths: mx.array | None = None
    """Number of real tokens of each row, int32 [rows]; None if all rows have the same width."""
    steps: list[Convolution | Scan] = field(default_factory=list)

    def fits(self, arrays: Sequence[int]) -> bool:
        """Return whether every state was recorded, given the number of state `arrays` per layer."""
        return len(self.steps) == sum(arrays)

    def replay(self, arrays: Sequence[int], keep: Sequence[int]) -> Iterator[tuple[mx.array, ...]]:
        """Yield the `arrays[layer]` states of each layer after the first `keep[row]` fed tokens of each row."""
        steps = iter(self.steps)
        for count in arrays:
            yield tuple(next(steps).after(keep) for _ in range(count))


class RecordingConv1d(nn.Conv1d):
    """An `nn.Conv1d` that records its input while a recording is open; parameters and results are unchanged."""

    def __call__(self, x: mx.array) -> mx.array:
        if Recording.open is not None and Recording.open.records:
            Recording.open.steps.append(Convolution(x, self.weight.shape[1]))
        return super().__call__(x)


def attach(model: nn.Module) -> bool:
    """Make recurrent layers recordable. Return False if no layer is of a known kind: tokens are then carried over."""
    recordable = False
    for _, module in model.named_modules():
        source = sys.modules[type(module).__module__]
        for name, inputs in SCANS.items():
            scan = getattr(source, name, None)
            if scan is not None and not hasattr(scan, "recorded_scan"):
                setattr(source, name, _recorded(scan, inputs))
            recordable |= scan is not None
        if type(module) is nn.Conv1d:
            module.__class__ = RecordingConv1d
        recordable |= isinstance(module, RecordingConv1d)
    return recordable


def _recorded(scan: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
    """Wrap `scan`: while a recording is open, pass row lengths that the model omits and, if requested, record calls."""
    signature = inspect.signature(scan)
    parameters = frozenset(signature.parameters)

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        record = Recording.open
        if record is None:
            return scan(*arguments, **keywords)
        bound = signature.bind(*arguments, **keywords).arguments
        if "lengths" in parameters and bound.get("lengths") is None:
            bound["lengths"] = record.lengths
        if record.records:
            record.steps.append(Scan(scan, parameters, inputs, bound))
        return scan(**bound)

    wrapper.recorded_scan = scan  # type: ignore[attr-defined]
    return wrapper


@contextmanager
def recording(*, records: bool, lengths: mx.array | None) -> Iterator[Recording]:
    """Keep a recording open for the forwards inside the `with` block."""
    Recording.open = record = Recording(records, lengths)
    try:
        yield record
    finally:
        Recording.open = None
