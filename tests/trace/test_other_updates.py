"""Optimizers of other kinds: run from hooks, around others, with state in their own classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.trace.graph import Role


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Updater:
    """Holds the optimizers as an attribute."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [torch.optim.Adam([p]) for p in model.parameters()]

    def update(self, parameter: torch.Tensor) -> None:
        for optimizer in self.optimizers:
            if optimizer.param_groups[0]["params"][0] is parameter:
                optimizer.step()
                optimizer.zero_grad()


def _update(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
    optimizer.step()
    parameter.grad = None


def by_closure(model: nn.Module) -> None:
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def by_method(model: nn.Module) -> None:
    updater = Updater(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(updater.update)


def by_partial(model: nn.Module) -> None:
    for parameter in model.parameters():
        own = torch.optim.Adam([parameter])
        parameter.register_post_accumulate_grad_hook(partial(_update, own))


@pytest.mark.parametrize("register", [by_closure, by_method, by_partial])
def test_optimizers_in_backward_hooks_are_profiled(register: Any) -> None:
    model, batch = network(), torch.randn(4, 128)
    without = ss.profile(model, batch, loss=loss, accounting="device")
    register(model)
    hooks = [dict(p._post_accumulate_grad_hooks) for p in model.parameters()]
    found = ss.profile(model, batch, loss=loss, accounting="device")
    state = 2 * sum(p.nbytes for p in model.parameters())
    counts = 4 * len(list(model.parameters()))
    assert found.bytes_by_role[Role.OPTIMIZER_STATE] in (state, state + counts)
    assert found.peak_bytes > without.peak_bytes
    assert hooks == [dict(p._post_accumulate_grad_hooks) for p in model.parameters()]
    measured = ss.measure(model, batch, loss=loss)
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Halved(torch.Tensor):
    """A moment kept in 16 bits, as a tensor that wraps another."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Halved:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=torch.float32)
        made.held = held
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, meta: Any, size: Any, stride: Any) -> Halved:
        return cls(inner["held"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            args[0].held.copy_(args[1])
            return args[0]
        plain = [a.held.float() if isinstance(a, Halved) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Compiled(torch.optim.Optimizer):
    """As torchao writes its optimizers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["momentum"] = Halved(torch.zeros_like(p, dtype=torch.bfloat16))
            torch.compile(moved, fullgraph=True)(p.detach(), p.grad, state["momentum"])


def moved(p: torch.Tensor, gradient: torch.Tensor, momentum: torch.Tensor) -> None:
    new = momentum * 0.9 + gradient
    momentum.copy_(new)
    p.sub_(new * 0.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_compiled_update_with_wrapped_state_is_profiled(device: str) -> None:
    model, batch = network(), torch.randn(4, 128)
    before = torch.compile
    found = ss.profile(
        model, batch, loss=loss, optimizer=Compiled(model.parameters()), accounting="device",
        device=device,
    )  # fmt: skip
    weights = sum(p.nbytes for p in model.parameters())
    state = found.bytes_by_role[Role.OPTIMIZER_STATE]
    assert state == pytest.approx(weights / 2, rel=0.02)
    assert found.bytes_by_role[Role.BUFFER] == 0
    assert torch.compile is before


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit"])
def test_torchao(name: str) -> None:
    kind = getattr(pytest.importorskip("torchao.optim", exc_type=ImportError), name)
    model, batch = network(), torch.randn(4, 128)
    found = ss.profile(
        model, batch, loss=loss, optimizer=kind(model.parameters()), accounting="device"
    )
    state = found.bytes_by_role[Role.OPTIMIZER_STATE]
    count = sum(p.numel() for p in model.parameters())
    assert state < (2.4 if name == "AdamW8bit" else 1.4) * count


def test_bitsandbytes() -> None:
    optimizers = pytest.importorskip("bitsandbytes.optim", exc_type=ImportError)
    model, batch = network(), torch.randn(4, 128)
    own = optimizers.AdamW8bit(model.parameters())
    found = ss.profile(model, batch, loss=loss, optimizer=own, accounting="device")
    measured = ss.measure(model, batch, loss=loss, optimizer=own)
    assert found.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


class Lookahead(torch.optim.Optimizer):
    """Moves halfway to an average of the weights every other step (Zhang et al., 2019)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        params = [p for group in inner.param_groups for p in group["params"]]
        super().__init__(params, {})
        self.inner, self.steps = inner, 0
        self.slow = [p.detach().clone() for p in params]
        self.seen: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            self.seen[p] = self.steps
            if self.steps % 2 == 0:
                p.copy_(slow.lerp_(p, 0.5))


def test_what_an_optimizer_keeps_beside_its_state_is_its_own() -> None:
    model, batch = network(), torch.randn(8, 128)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=10.0))
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    before = [slow.tolist() for slow in optimizer.slow]
    ss.profile(model, batch, accounting="device", **given)
    found = ss.verify([ss.Microbatching(4)], model, [batch], **given)
    assert all(row.ok for row in found.comparisons)
    assert [slow.tolist() for slow in optimizer.slow] == before
    assert optimizer.steps == len(optimizer.seen) == 0


class Bare(torch.optim.Optimizer):
    """Passes on what another does, and was made without `Optimizer.__init__`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_without_hooks_is_refused_by_verify_in_one_line() -> None:
    model, batch = network(), torch.randn(8, 128)
    given: dict[str, Any] = {
        "loss": loss, "optimizer": Bare(torch.optim.SGD(model.parameters(), lr=0.1)),
    }  # fmt: skip
    assert ss.profile(model, batch, accounting="device", **given).peak_bytes > 0
    with pytest.raises(ss.InputError, match=r"Bare is not built on torch\.optim"):
        ss.verify([ss.Microbatching(4)], model, [batch], **given)
