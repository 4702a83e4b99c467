"""AdamW whose second moments are a row and a column for each matrix: a prototype to compare with.

v = r c / mean(r), r and c the averages of g² over columns and over rows (Shazeer & Stern, 2018,
section 4), in the place of Adam's second moment; all else is AdamW. The first moment is in FP32, or
in the codes of `OptimizerState`.
"""

from __future__ import annotations

from typing import Any

import torch

from shoestring.kernels.codes import BLOCK, blocks_of, decode, encode


class FactoredAdamW(torch.optim.Optimizer):
    """Decoupled weight decay; tensors that are not matrices keep whole second moments."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float,
        bits: int = 32, eps: float = 1e-8, smallest: int = 4096, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps, "bits": bits,
            "smallest": smallest,
        })  # fmt: skip
        device = self.param_groups[0]["params"][0].device
        self._random = torch.Generator(device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, self.state[parameter])

    def _update(
        self, p: torch.Tensor, g: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        (first, second), bits = group["betas"], group["bits"]
        bits = bits if p.numel() >= group["smallest"] else 32
        square = g.square()
        if not state:
            state["step"] = 0
            matrix = p.dim() == 2
            state["row"] = torch.zeros_like(square.mean(1) if matrix else square)
            state["column"] = torch.zeros_like(square.mean(0)) if matrix else None
            state["first"] = self._kept(torch.zeros_like(p), bits)
        state["step"] += 1
        t, row, column = state["step"], state["row"], state["column"]
        row.lerp_(square if column is None else square.mean(1), 1 - second)
        if column is None:
            v = row
        else:
            column.lerp_(square.mean(0), 1 - second)
            v = torch.outer(row / row.mean().clamp_min(1e-30), column)
        m = self._read(state["first"], p, bits).lerp_(g, 1 - first)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        root = (v / (1 - second**t)).sqrt_().add_(group["eps"])
        p.addcdiv_(m, root, value=-group["lr"] / (1 - first**t))
        state["first"] = self._kept(m, bits)

    def _kept(self, m: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
        if bits == 32:
            return (m,)
        blocks, size = blocks_of(m.numel(), bits), BLOCK[bits]
        rows = m.new_zeros(blocks * size)
        rows[: m.numel()] = m.reshape(-1)
        noise = torch.rand(blocks, size, generator=self._random, device=m.device)
        return encode(rows.view(blocks, size), noise, bits, signed=True)

    def _read(self, held: tuple[torch.Tensor, ...], p: torch.Tensor, bits: int) -> torch.Tensor:
        if bits == 32:
            return held[0]
        return decode(held[0], held[1], bits, signed=True).view(-1)[: p.numel()].view_as(p)
