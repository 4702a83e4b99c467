"""A training loop and a memory tracker that use nothing of shoestring's but the step they check."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


def mapped(change: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """A batch with every tensor changed; dataclasses are opened, too."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return dataclasses.replace(
                leaf, **{k: mapped(change, v) for k, v in vars(leaf).items()}
            )
        return leaf

    return tree_map(one, batch)


def leaves(batch: Any) -> list[Tensor]:
    """Every tensor of a batch."""
    found: list[Tensor] = []
    mapped(lambda t: found.append(t) or t, batch)  # type: ignore[func-returns-value]
    return found


def seed(number: int) -> None:
    """All global streams that a step may draw from."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def outside(loss: Any) -> list[nn.Module]:
    """Networks that a loss holds beside the model."""
    cells = getattr(loss, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, nn.Module)]


class Seen:
    """What one step made: loss, gradients before the update, buffers after it."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def note(self, model: nn.Module, scale: Any = None) -> None:
        """Copy the gradients, without a loss scale."""
        for name, p in model.named_parameters():
            if p.grad is not None:
                held = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().double()
                self.gradients[name] = held if scale is None else held / float(scale)


def plain_step(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> Seen:
    """Forward, backward, update."""
    seen = Seen()
    optimizer.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    seen.loss = value.detach().double()
    seen.note(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return seen


def planned_step(step: Any, batch: Any) -> Seen:
    """The same by a step of the library."""
    seen = Seen()

    def note(*_: Any) -> None:
        seen.note(step.model, step.loss_scale)

    note.each_parameter = True  # type: ignore[attr-defined] # some gradients come before others
    handle = step.optimizer.register_step_pre_hook(note)
    seen.loss = step(batch).detach().double()
    handle.remove()
    seen.buffers = {n: b.detach().clone() for n, b in step.model.named_buffers()}
    return seen


def apart(expected: Seen, found: Seen) -> tuple[float, float]:
    """Relative L2 error of all gradients, and of the worst tensor."""
    if expected.gradients.keys() != found.gradients.keys():
        return float("inf"), float("inf")
    if not all(bool(torch.isfinite(g).all()) for g in found.gradients.values()):
        return float("inf"), float("inf")  # NaN would compare as nothing
    norm = sum(float(g.norm()) ** 2 for g in expected.gradients.values()) ** 0.5
    total, worst = 0.0, 0.0
    for name, plain in expected.gradients.items():
        error = float((plain - found.gradients[name]).norm())
        total += error**2
        worst = max(worst, error / max(float(plain.norm()), 1e-3 * norm, 1e-30))
    return total**0.5 / max(norm, 1e-30), worst


def buffers_apart(expected: Seen, found: Seen) -> float:
    """The worst relative error of a buffer."""
    worst = 0.0
    for name, plain in expected.buffers.items():
        other = found.buffers.get(name)
        if other is None or not plain.is_floating_point():
            continue
        error = float((plain.double() - other.double()).norm())
        worst = max(worst, error / max(float(plain.double().norm()), 1e-12))
    return worst


# -- draws of its own ------------------------------------------------------------------------------


class PerExample(TorchFunctionMode):
    """Every example draws from a stream of its own: by its number and the number of the call."""

    def __init__(self, first: int, rows: int) -> None:
        super().__init__()
        self._first, self._rows, self._calls = first, rows, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("dropout", "dropout2d") and func in (F.dropout, F.dropout2d):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            p = given.get("p", 0.5)
            if not given.get("training", True) or p == 0:
                return given["input"]
            x = given["input"]
            shape = x.shape[:2] if name == "dropout2d" else x.shape
            kept = self._filled(torch.empty(shape), "rand").to(x.device) >= p
            mask = kept[(...,) + (None,) * (x.dim() - kept.dim())]
            return x * mask.to(x.dtype) / (1 - p)
        if name == "scaled_dot_product_attention":
            if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0):
                raise NotImplementedError("dropout inside attention")
        if name in ("rand", "randn", "rand_like", "randn_like", "randint"):
            made = func(*args, **kwargs)
            bounds = [a for a in args if isinstance(a, int)] if name == "randint" else []
            drawn = self._filled(torch.empty(made.shape), name.partition("_")[0], bounds)
            return made.copy_(drawn.to(made.dtype))
        if name in ("bernoulli_", "normal_", "uniform_", "multinomial", "lstm", "gru"):
            dropped = name in ("lstm", "gru") and float(args[5]) > 0 and args[6]
            if name not in ("lstm", "gru") or dropped:
                raise NotImplementedError(f"draws of {name}")
        return func(*args, **kwargs)

    def _filled(self, out: Tensor, kind: str, bounds: Any = ()) -> Tensor:
        self._calls += 1
        rows = out.shape[0] if out.dim() else 0
        split = rows and rows % self._rows == 0
        blocks = out.chunk(self._rows) if split else (out,)
        for number, block in enumerate(blocks):
            seed = self._calls * 100_003 + (self._first + number + 1 if split else 0)
            stream = torch.Generator().manual_seed(seed)
            if kind == "randint":
                low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
                block.copy_(torch.randint(low, high, block.shape, generator=stream))
            elif kind == "randn":
                block.copy_(torch.randn(block.shape, generator=stream))
            else:
                block.copy_(torch.rand(block.shape, generator=stream))
        return out


def _position(part: Tensor, whole: Tensor) -> int:
    """Of a part's first row in the batch, by value: a part may be a cast copy."""
    taken = whole.to(part.dtype)
    places = range(len(whole) - len(part) + 1)
    return next((i for i in places if torch.equal(taken[i : i + len(part)], part)), 0)


def by_example(loss: Any, whole: Any) -> Any:
    """The loss, with draws that do not depend on which examples of a batch run together."""
    rows = next(t for t in leaves(whole) if t.dim())

    def wrapped(model: nn.Module, batch: Any) -> Tensor:
        first = next(t for t in leaves(batch) if t.dim())
        start = _position(first, rows)
        host = random.getstate(), np.random.get_state()[1:3]
        with PerExample(start, first.shape[0]):
            value: Tensor = loss(model, batch)
        if repr((random.getstate(), np.random.get_state()[1:3])) != repr(host):
            raise NotImplementedError("draws of NumPy or Python")
        return value

    return wrapped


# -- memory ----------------------------------------------------------------------------------------


def peak_of(run: Callable[[], Any], held: list[Tensor], device: str) -> int:
    """Bytes at the peak, by the allocator's own events; what is held between steps included."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    there = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as seen:  # fmt: skip
        run()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = peak = 0
    for _, nbytes in changes:
        total += nbytes
        peak = max(peak, total)
    return there + peak


def held_by(model: nn.Module, optimizer: Any, batch: Any) -> list[Tensor]:
    """All tensors that exist between two steps."""
    state = [t for s in optimizer.state.values() for t in tree_leaves(s)]
    own = [*model.parameters(), *model.buffers(), *state, *leaves(batch)]
    return [t for t in own if isinstance(t, Tensor)]
