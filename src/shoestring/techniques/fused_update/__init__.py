"""FusedUpdate: the optimizer's update as one kernel, without a copy of the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch

from ...errors import InputError
from ...torch_private.dispatch import without_modes
from ...trace.cuda import on_cuda
from ...trace.fakes import is_fake
from ..apart import Chunk, hooks_once, run_alone
from ..base import Setup, Technique
from ..claims import MOVED, Circumstances, Claim, Level
from ..offers import Context, Offer
from ..registry import register

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_COUNTS_STEPS = (torch.optim.Adam, torch.optim.AdamW)


@register
@dataclass(frozen=True)
class FusedUpdate(Technique):
    """Let PyTorch's fused kernel update SGD, Adam or AdamW.

    By default PyTorch's optimizers update all tensors together on CUDA, and copy each of them. The
    fused kernel makes no copies, and Adam counts its steps on the device, so that the whole
    training step can be one CUDA graph.

    Examples:
        >>> step = ss.apply([ss.FusedUpdate()], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "fused_update"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 25
    addable: ClassVar[bool] = True
    updates_on_device: ClassVar[bool] = True
    leaves_passes: ClassVar[bool] = True
    state_first: ClassVar[bool] = True

    def short(self) -> str:
        """Its name."""
        return "fused update"

    def describe(self) -> tuple[str, str]:
        """One kernel."""
        return "fused", _WHY

    def check(self, setup: Setup) -> None:
        """Only optimizers that have such a kernel, and leave the choice open."""
        optimizer = setup.optimizer
        name = type(optimizer).__name__
        if type(optimizer) not in _FUSED:
            raise InputError(f"{name} has no fused update", hint="SGD, Adam and AdamW have one")
        for group in optimizer.param_groups:
            if group.get("foreach") or group.get("differentiable"):
                asked = "foreach" if group.get("foreach") else "differentiable"
                raise InputError(
                    f"{name} was made with {asked}=True", hint=f"leave {asked} out, or fused_update"
                )
            if any(p.is_complex() or p.is_sparse for p in group["params"]):
                raise InputError(f"{name} has no fused update of complex or sparse parameters")

    def apply(self, setup: Setup) -> None:
        """Switch the optimizer over, and again whenever a state was loaded that knows nothing."""
        if setup.update_on_device:  # another technique has put its own update there
            return
        optimizer, update, run = setup.optimizer, setup.update, setup.run
        for dtype in {p.dtype for g in optimizer.param_groups for p in g["params"] if _on_cpu(p)}:
            kind: Any = type(optimizer)
            if not _moves(kind, dtype):
                name = type(optimizer).__name__
                raise InputError(
                    f"the fused {name} of PyTorch {torch.__version__} leaves weights in {dtype} as "
                    "they are on the CPU",
                    hint="leave out fused_update",
                )
        before = [{k: group.get(k) for k in _SWITCHES} for group in optimizer.param_groups]
        switch(optimizer)
        early: list[torch.Tensor] = []
        started = False

        def after_state(batch: Any) -> torch.Tensor:
            nonlocal started
            if not started:
                started = True
                early.extend(make_state(optimizer))
            return run(batch)

        def fused() -> None:
            switch(optimizer)
            apart = _begin_later(optimizer)
            if not apart:
                update()
                return
            with hooks_once(optimizer):
                for chunk in apart:
                    run_alone(optimizer, chunk, update)

        def settle() -> None:  # one without a gradient has no state in plain training
            drop_unused(optimizer, early)
            early.clear()

        def undo() -> None:
            for group, values in zip(optimizer.param_groups, before, strict=True):
                group.update({k: v for k, v in values.items() if k in group})
            _place_counts(optimizer)

        setup.update, setup.run = fused, after_state
        setup.after_update.append(settle)
        setup.undo.append(undo)

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """On CUDA, where updates make copies otherwise."""
        groups = context.optimizer.param_groups
        already = all(g.get("fused") and g.get("capturable", True) for g in groups)
        if context.device == "cuda" and context.accounting == "device" and not already:
            yield Offer(cls(), _WHY, dominates=True)

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """The same formula, rounded elsewhere."""
        level = Level.ROUNDING
        yield Claim(level, "the fused kernel rounds less often", MOVED)


_WHY = "one kernel instead of copies of all parameters; can be part of a CUDA graph"
_SWITCHES = ("fused", "foreach", "capturable")


@cache
def _moves(kind: Any, dtype: torch.dtype) -> bool:
    """Whether the kernel on the CPU updates numbers of this type: PyTorch 2.13's SGD of 16 bits
    does so for the last few of a tensor alone."""
    with without_modes(), torch.enable_grad():
        tried = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        tried.grad = torch.ones_like(tried)
        kind([tried], lr=0.5, fused=True).step()
        return bool((tried < 0.75).all())


def _begin_later(optimizer: torch.optim.Optimizer) -> list[Chunk]:
    """Where momentum begins for some parameters and goes on for others: each apart.

    SGD's kernel takes all or none of it. An expert or an early exit may have a first gradient late.
    """
    if type(optimizer) is not torch.optim.SGD:
        return []
    chunks: list[Chunk] = []
    mixed = False
    for group in optimizer.param_groups:
        held = [p for p in group["params"] if p.grad is not None]
        has = {p: optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in held}
        parts = [[p for p in held if has[p] is there] for there in (True, False)]
        mixed |= bool(group["momentum"]) and all(parts)
        chunks += [(group, part) for part in parts if part]
    return chunks if mixed else []


def _on_cpu(parameter: torch.Tensor) -> bool:
    return parameter.device.type == "cpu" and not on_cuda(parameter)


def switch(optimizer: torch.optim.Optimizer) -> None:
    """Fused from now on; counts of steps go to the device."""
    moved = False
    for group in optimizer.param_groups:
        on_cuda = bool(group["params"]) and group["params"][0].is_cuda
        wanted = {"fused": True, "foreach": False}
        if "capturable" in group:
            wanted["capturable"] = on_cuda
        if any(group.get(k) != v for k, v in wanted.items()):
            group.update(wanted)
            moved = True
    if moved:
        _place_counts(optimizer)


@torch.no_grad()
def make_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Adam's state, before any activations are there; the parameters that got one.

    Made by the first update it would lie in the gaps that activations left, and keep them apart for
    the whole training.
    """
    made: list[torch.Tensor] = []
    if type(optimizer) not in _COUNTS_STEPS:
        return made
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            bare = parameter.requires_grad and not optimizer.state.get(parameter)
            if not bare or not parameter.is_cuda or is_fake(parameter):
                continue
            state = optimizer.state[parameter]
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] * bool(group["amsgrad"]))]
            for name in names:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            made.append(parameter)
    return made


def drop_unused(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    """Take away the state of those that no update has moved."""
    held = [p for p in parameters if "step" in optimizer.state.get(p, {})]
    if held:
        moved = torch.stack([optimizer.state[p]["step"] for p in held]).tolist()
        for parameter, count in zip(held, moved, strict=True):
            if not count:
                del optimizer.state[parameter]


def _place_counts(optimizer: torch.optim.Optimizer) -> None:
    """Adam's counts of steps where its settings want them."""
    if not isinstance(optimizer, _COUNTS_STEPS):
        return
    for group in optimizer.param_groups:
        there = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            count = state.get("step")
            if isinstance(count, torch.Tensor):
                state["step"] = count.to(parameter.device if there else "cpu", torch.float32)
