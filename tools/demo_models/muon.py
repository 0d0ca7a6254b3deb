"""Muon in float32: momentum orthogonalised by Newton-Schulz steps, matrices of one shape together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """Return, for each matrix of a stack, roughly the nearest semi-orthogonal one."""
    turned = stack.shape[-2] > stack.shape[-1]
    result = stack.mT if turned else stack
    result = result / (result.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    first, second, third = COEFFICIENTS
    for _ in range(steps):
        gram = result @ result.mT
        result = first * result + (second * gram + third * gram @ gram) @ result
    return result.mT if turned else result


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; updates are scaled to AdamW's usual size."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        """Take two-dimensional parameters only."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ARG002
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes[parameter.shape].append(parameter)
            for shape, parameters in shapes.items():
                moves = orthogonalise(torch.stack([self._momentum(p, group["momentum"]) for p in parameters]))
                size = 0.2 * max(shape) ** 0.5
                for parameter, move in zip(parameters, moves, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(move, alpha=-group["lr"] * size)

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        state = self.state[parameter]
        if "average" not in state:
            state["average"] = torch.zeros_like(parameter)
        state["average"].lerp_(parameter.grad, 1 - momentum)
        return torch.lerp(parameter.grad, state["average"], momentum)
