"""A module that treats every row alone, run on some rows at a time.

Forward keeps the input and nothing else. Backward runs each tile again and differentiates it, so
that what is between the layers exists for one tile only. Gradients of the weights are added tile
by tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Rows = Callable[[Tensor], Tensor]


def tiled(run: Rows, module: nn.Module, x: Tensor, rows: int) -> Tensor:
    """`run(x)`, so many rows at a time."""
    flat = x.reshape(-1, x.shape[-1])
    trained = [p for p in module.parameters() if p.requires_grad]
    if torch.is_grad_enabled():
        made: Tensor = _Tiled.apply(flat, run, rows, trained, *trained)
    else:
        made = _in_tiles(run, flat, rows)
    return made.view(*x.shape[:-1], made.shape[-1])


def _in_tiles(run: Rows, flat: Tensor, rows: int) -> Tensor:
    made: Tensor | None = None
    for start in range(0, flat.shape[0], rows):
        tile = run(flat[start : start + rows])
        if made is None:
            made = tile.new_empty(flat.shape[0], tile.shape[-1])
        made[start : start + rows] = tile
        del tile
    assert made is not None
    return made


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, run: Rows, rows: int, held: list[Tensor], *trained: Tensor
    ) -> Tensor:
        ctx.save_for_backward(flat)
        ctx.run, ctx.rows, ctx.held = run, rows, held
        kind = flat.device.type
        ctx.cast = kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return _in_tiles(run, flat, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (flat,) = ctx.saved_tensors
        kind, enabled, dtype = ctx.cast
        wanted = ctx.needs_input_grad[0]
        grad_flat = torch.empty_like(flat) if wanted else None
        sums: list[Tensor | None] = [None] * len(ctx.held)
        for start in range(0, flat.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            with torch.enable_grad(), torch.autocast(kind, dtype=dtype, enabled=enabled):
                rows = flat[part].detach().requires_grad_(wanted)
                made = ctx.run(rows)
            inputs = [rows] * wanted + ctx.held
            found = list(torch.autograd.grad(made, inputs, grad[part], allow_unused=True))
            del made
            if grad_flat is not None:
                own = found.pop(0)
                grad_flat[part] = 0 if own is None else own
                del own
            for index in range(len(sums)):
                one, found[index] = found[index], None
                if one is not None:
                    known = sums[index]
                    sums[index] = one if known is None else known.add_(one)
                del one
        return grad_flat, None, None, None, *sums
