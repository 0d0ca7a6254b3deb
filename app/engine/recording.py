"""What a recurrent layer was fed during a verify forward, so that only its scan is run again.

mlx-lm's models call a module-level function of `SCANS` and an `nn.Conv1d`; `attach` wraps both once, and nothing is
kept unless a recording is open. Re-running the scan on the recorded inputs costs no matrix product (the idea of z-lab's
MLX code for DFlash).
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn

SCANS = ("gated_delta_update", "ssm_update")
SCANNED = frozenset({"q", "k", "v", "a", "b", "hidden_states", "B", "C", "dt"})
"""The arguments of a scan that have a place for each token."""


@dataclass
class Recording:
    """Scans and convolution inputs of one forward, in layer order."""

    open: ClassVar["Recording | None"] = None
    """That of the forward under way: the MLX thread is the only one that runs a model."""
    scans: list[tuple[Callable[..., Any], inspect.BoundArguments]] = field(default_factory=list)
    convolutions: list[tuple[mx.array, int]] = field(default_factory=list)
    """(input [rows, kernel - 1 + width, channels], kernel size)."""


class RecordingConv1d(nn.Conv1d):
    """An `nn.Conv1d` that notes its input while a recording is open; parameters and results are unchanged."""

    def __call__(self, x: mx.array) -> mx.array:
        if Recording.open is not None:
            Recording.open.convolutions.append((x, self.weight.shape[1]))
        return super().__call__(x)


def attach(model: nn.Module) -> bool:
    """Make the model's recurrent layers recordable. False: it has none of a known kind, so tokens are carried over."""
    recordable = False
    for _, module in model.named_modules():
        source = sys.modules[type(module).__module__]
        for name in SCANS:
            scan = getattr(source, name, None)
            if scan is None:
                continue
            recordable = True
            if not hasattr(scan, "recorded_scan"):
                setattr(source, name, _recorded(scan))
        if type(module) is nn.Conv1d:
            module.__class__ = RecordingConv1d
    return recordable


def _recorded(scan: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(scan)

    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if Recording.open is not None:
            Recording.open.scans.append((scan, signature.bind(*arguments, **keywords)))
        return scan(*arguments, **keywords)

    wrapper.recorded_scan = scan  # type: ignore[attr-defined]
    return wrapper


@contextmanager
def recording() -> Iterator[Recording]:
    """Keep the scans of the forwards that run inside."""
    Recording.open = record = Recording()
    try:
        yield record
    finally:
        Recording.open = None


def replay(record: Recording, layer: int, keep: Sequence[int]) -> tuple[mx.array, mx.array]:
    """(convolution state, recurrent state) of one layer after the first `keep[row]` fed tokens of each row.

    One row needs no mask: its inputs are cut. Several are masked; Mamba2's scan also wants `lengths`.
    """
    conv_input, kernel = record.convolutions[layer]
    scan, bound = record.scans[layer]
    arguments = dict(bound.arguments)
    starts = mx.array(list(keep), dtype=mx.int32)
    tail = starts[:, None] + mx.arange(kernel - 1, dtype=mx.int32)
    conv_state = mx.take_along_axis(conv_input, tail[..., None], axis=1)
    if len(keep) == 1:
        if keep[0] == 0:
            return conv_state, arguments["state"]
        for name in SCANNED & arguments.keys():
            arguments[name] = arguments[name][:, : keep[0]]
        arguments["mask"] = None
        if "lengths" in arguments:
            arguments["lengths"] = None
    else:
        width = conv_input.shape[1] - (kernel - 1)
        arguments["mask"] = mx.arange(width) < starts[:, None]
        if "lengths" in inspect.signature(scan).parameters:
            arguments["lengths"] = starts
    return conv_state, scan(**arguments)[1]
