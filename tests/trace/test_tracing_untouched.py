"""Tracing changes nothing that was given, allocates nothing, and takes any optimizer."""

import functools
import random
import resource
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.errors import InputError
from shoestring.trace.graph import Phase, Role, Trace
from shoestring.trace.tracing import trace_model


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """A loss for any model of one tensor."""
    return model(batch).square().mean()


def role_bytes(trace: Trace, role: Role) -> int:
    return sum(storage.nbytes for storage in trace.storages if storage.role is role)


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """A model in the middle of training, with gradients and optimizer state."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    model[1].eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = torch.randn(3, 4)
    mean_square(model, batch).backward()
    optimizer.step()
    return model, optimizer, batch


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = {**model.state_dict(), **{f"{n}.grad": p.grad for n, p in model.named_parameters()}}
    state = optimizer.state_dict()
    for index, entries in state["state"].items():
        tensors.update({f"{index}.{name}": entry for name, entry in entries.items()})
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_given_is_left_alone(device: str) -> None:
    model, optimizer, batch = trained()
    before, kept_batch = snapshot(model, optimizer), batch.clone()
    identities = [id(p) for p in model.parameters()] + [id(p.grad) for p in model.parameters()]
    groups = [dict(group) for group in optimizer.param_groups]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    versions = [p._version for p in model.parameters()]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        random.random(), np.random.rand(), torch.rand(3)
        return mean_square(model, batch)

    trace_model(model, batch, loss=loss, optimizer=optimizer, device=device)
    for name, tensor in snapshot(model, optimizer).items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(batch, kept_batch)
    assert identities == [id(p) for p in model.parameters()] + [
        id(p.grad) for p in model.parameters()
    ]
    assert [p._version for p in model.parameters()] == versions
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert [m.training for m in model] == [True, False, True, True]
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.array_equal(np.random.get_state()[1], streams[2])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_failed_trace_leaves_no_hooks_behind() -> None:
    model, optimizer, _ = trained()
    plain_apply = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(InputError):
        trace_model(model, torch.randn(3, 5), loss=mean_square, optimizer=optimizer)
    assert torch.autograd.Function.__dict__["apply"] is plain_apply
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks
    mean_square(model, torch.randn(3, 4)).backward()


def test_nothing_is_allocated() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(30)])
        batch = torch.randn(512, 8192)
    assert sum(p.nbytes for p in model.parameters()) > 8e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = trace_model(model, batch, loss=mean_square, optimizer="adam")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert role_bytes(trace, Role.OPTIMIZER_STATE) > 16e9
    assert (after - before) * 1024 < 100e6


def test_model_built_on_fake_tensors() -> None:
    with FakeTensorMode():
        model, batch = nn.Linear(3, 5), torch.randn(4, 3)
    fake = trace_model(model, batch, loss=mean_square, optimizer="sgd")
    real = trace_model(nn.Linear(3, 5), torch.randn(4, 3), loss=mean_square, optimizer="sgd")
    assert fake.storages == real.storages
    assert model.weight.grad is None


# -- optimizers ------------------------------------------------------------------------------------


def test_optimizer_under_a_scheduler() -> None:
    model, optimizer, batch = trained()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    plain = trace_model(model, batch, loss=mean_square, optimizer="adam")
    trace = trace_model(model, batch, loss=mean_square, optimizer=optimizer)
    assert [p.state_elements for p in trace.parameters] == [
        p.state_elements for p in plain.parameters
    ]
    optimizer.step()
    schedule.step()


def test_parameter_groups() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "momentum": 0.9},
            {"params": [model[1].weight], "lr": 0.01},
        ],
        lr=0.1,
    )
    trace = trace_model(model, torch.randn(3, 4), loss=mean_square, optimizer=optimizer)
    assert {p.name: p.state_elements for p in trace.parameters} == {
        "0.weight": (24,),
        "0.bias": (6,),
        "1.weight": (),
        "1.bias": (),
    }


def test_optimizer_with_attributes_and_hooks_of_its_own() -> None:
    class Scaled(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.scale = 0.5

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(self.scale)
            super().step(closure)

    model = nn.Linear(4, 6)
    optimizer = Scaled(model.parameters(), lr=0.1)
    called: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    trace = trace_model(model, torch.randn(3, 4), loss=mean_square, optimizer=optimizer)
    scalings = [op for op in trace.ops if op.name == "aten.mul_"]
    assert [op.phase for op in scalings] == [Phase.OPTIMIZER] * 2
    assert not called


@functools.lru_cache(maxsize=4)
def positions(length: int) -> tuple[Tensor, ...]:
    """As of sines: made once, for all models."""
    return (torch.arange(float(length)),)


def test_what_functions_remember_of_a_trace_is_forgotten() -> None:
    model, batch = nn.Linear(3, 4), torch.randn(2, 3)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) + positions(4)[0]).square().mean()

    trace_model(model, batch, loss=loss)
    assert type(positions(4)[0]) is Tensor
    loss(model, batch).backward()
