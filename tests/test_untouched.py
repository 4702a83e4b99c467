"""A fingerprint of everything a user has, before and after every public call."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import BudgetError, InputError, ShoestringError
from shoestring.techniques import Checkpointing, Microbatching, Offload, Precision


class Wrapped(torch.optim.Optimizer):
    """As accelerate's: a subclass whose properties write to what it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Imitating:
    """As Lightning's: of no class but one made on the way, everything else by `__getattr__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        kind = type("Imitating" + type(optimizer).__name__, (Imitating, type(optimizer)), {})
        self.__class__ = kind

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, shares its groups, and has a state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                slow.lerp_(p, 0.5)
                p.copy_(slow)


def accelerated(optimizer: torch.optim.Optimizer) -> Any:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.Accelerator(cpu=True).prepare_optimizer(optimizer)


def lightning(optimizer: torch.optim.Optimizer) -> Any:
    wrappers = pytest.importorskip(
        "lightning.pytorch.core.optimizer", reason="lightning is not installed"
    )
    return wrappers.LightningOptimizer(optimizer)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # type: ignore[attr-defined]
    return optimizer


OPTIMIZERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "plain": lambda optimizer: optimizer,
    "wrapped": Wrapped,
    "imitating": Imitating,
    "wrapped twice": lambda optimizer: Wrapped(Wrapped(optimizer)),
    "with its own state": Lookahead,
    "scheduled": scheduled,
    "accelerate": accelerated,
    "lightning": lightning,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + x.detach().mean(0)
        return x + F.dropout(torch.relu(self.norm(self.linear(x))), 0.1)


class Critic(nn.Module):
    """The other half: statistics, spectral norm, a counter, a list, an assigned buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
        self.norm, self.calls = nn.BatchNorm1d(4), 0
        self.seen: list[Any] = []
        self.register_buffer("center", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x)
        out = self.norm(self.linear(x))
        self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
        return out - self.center


class World:
    """A model in training, and all that the loss uses beside it."""

    def __init__(self, wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(2)))
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.reference = nn.Linear(8, 8).requires_grad_(False)
        self.critic, self.scale = Critic(), torch.ones((), requires_grad=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters())
        inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer, self.inner = wrap(inner), inner
        self.history: list[Any] = []
        self.hooked: list[Any] = []
        self.batch = torch.randn(16, 8)
        self.calls = 0
        self.plain_loss().backward()
        inner.step()
        self.model[0].register_forward_hook(lambda m, args, out: self.hooked.append(out))
        self.model[1].linear.weight.register_hook(lambda gradient: gradient * 1.0)

    def plain_loss(self) -> torch.Tensor:
        return self.plain_of(self.model, self.batch)

    @staticmethod
    def plain_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = model(batch)
        random.random(), np.random.rand(), torch.rand(3)
        judged = self.critic(out)
        self.history.append(judged)
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            target = self.reference(self.average(batch))
        return judged.square().mean() * self.scale + F.mse_loss(out, target)

    def stepping_loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """As above, and the critic trains."""
        self.critic_optimizer.zero_grad()
        self.critic(model(batch).detach()).mean().backward()
        self.critic_optimizer.step()
        return self.loss(model, batch)

    def fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        networks = {"model": self.model, "critic": self.critic, "average": self.average,
                    "reference": self.reference}  # fmt: skip
        for name, network in networks.items():
            for path, module in network.named_modules():
                for key, value in vars(module).items():
                    if key.startswith("_") and "hooks" not in key:
                        continue
                    found[f"{name}.{path}.{key}"] = _print(value)
                for key, value in (*module._parameters.items(), *module._buffers.items()):
                    found[f"{name}.{path}.{key}"] = _print(value)
                    if value is not None:
                        found[f"{name}.{path}.{key}.grad"] = _print(value.grad)
        found["scale"] = _print(self.scale), _print(self.scale.grad)
        for name, optimizer in {"inner": self.inner, "critic": self.critic_optimizer}.items():
            found[f"{name} groups"] = [
                {**group, "params": [id(p) for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            found[f"{name} state"] = {
                id(p): {key: _print(value) for key, value in held.items()}
                for p, held in optimizer.state.items()
            }
            found[f"{name} attributes"] = {
                key: _print(value)
                for key, value in vars(optimizer).items()
                if key not in ("_zero_grad_profile_name", "state", "param_groups")
            }
        wrapper = self.optimizer
        own = dict(wrapper.state) if isinstance(wrapper, Lookahead) else {}
        found["wrapper"] = getattr(wrapper, "steps", None), len(own), sorted(vars(wrapper))
        found["variables"] = self.calls, len(self.history), len(self.hooked)
        found["streams"] = (
            torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
        )  # fmt: skip
        found["batch"] = _print(self.batch)
        found["defaults"] = torch.is_grad_enabled(), torch.get_default_dtype()
        return found


def _print(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value), type(value), value.dtype, value.detach().tolist()
    if isinstance(value, dict):
        return id(value), {key: id(held) for key, held in value.items()}
    if isinstance(value, list):
        return id(value), len(value)
    return value if isinstance(value, (bool, int, float, str)) else id(value)


PLAN = [Checkpointing("residual-2")]


def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    model(batch)
    raise RuntimeError("not today")


class Refusing(Microbatching):
    """Fails when everything before it has been applied."""

    def apply(self, setup: Any) -> None:
        raise InputError("no")


def _profile(world: World, loss: Any) -> None:
    ss.profile(world.model, world.batch, loss=loss, optimizer=world.optimizer)


def _profile_cuda(world: World, loss: Any) -> None:
    ss.profile(
        world.model, world.batch, loss=loss, optimizer=world.optimizer, device="cuda",
        accounting="device",
    )  # fmt: skip


def _measure(world: World, loss: Any) -> None:
    ss.measure(world.model, world.batch, loss=loss, optimizer=world.optimizer)


def _plan(world: World, loss: Any) -> None:
    with pytest.raises(BudgetError):
        ss.plan(world.model, world.batch, loss=loss, optimizer=world.optimizer, budget="1 KB",
                allow="lossless")  # fmt: skip


def _verify(world: World, loss: Any) -> None:
    ss.verify(PLAN, world.model, [world.batch], loss=loss, optimizer=world.optimizer, steps=1)


def _failing_apply(world: World, loss: Any) -> None:
    techniques = [Checkpointing("residual-2"), Refusing(4)]
    if not isinstance(world.optimizer, (Lookahead, Wrapped)):  # those keep their own updates
        techniques.insert(0, Precision("bf16"))  # type: ignore[arg-type]
    with pytest.raises(InputError):
        ss.apply(techniques, world.model, world.optimizer, loss=loss)


def _failing_fit(world: World, loss: Any) -> None:
    given: dict[str, Any] = {"loss": loss, "optimizer": world.optimizer, "allow": "lossless"}
    with pytest.raises(BudgetError):
        ss.fit(world.model, world.batch, budget="1 KB", **given)
    with pytest.raises(InputError, match="enforce"):
        ss.fit(world.model, world.batch, budget="10 GB", enforce=True, **given)


def _failing_calls(world: World, loss: Any) -> None:
    given: dict[str, Any] = {"loss": failing, "optimizer": world.optimizer}
    for call in (ss.profile, ss.measure):
        with pytest.raises(ShoestringError):
            call(world.model, world.batch, **given)
    with pytest.raises(ShoestringError):
        ss.plan(world.model, world.batch, budget="1 GB", **given)
    with pytest.raises(ShoestringError):
        ss.verify(PLAN, world.model, [world.batch], **given)


CALLS = (_profile, _profile_cuda, _measure, _plan, _verify, _failing_apply, _failing_fit,
         _failing_calls)  # fmt: skip


SHORT = (_profile, _measure, _verify, _failing_apply)
CASES = [
    pytest.param(call, wrap, marks=() if wrap == "plain" or call in SHORT else pytest.mark.slow)
    for call in CALLS
    for wrap in OPTIMIZERS
]


@pytest.mark.parametrize(
    ("call", "wrap"), CASES, ids=lambda value: getattr(value, "__name__", value).strip("_")
)
def test_nothing_of_the_users_changes(call: Callable[[World, Any], None], wrap: str) -> None:
    world = World(OPTIMIZERS[wrap])
    before = world.fingerprint()
    call(world, world.loss if wrap != "plain" else world.stepping_loss)
    after = world.fingerprint()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value == after[key], key


@pytest.mark.parametrize("wrap", ["wrapped", "imitating", "accelerate", "lightning"])
def test_a_wrapped_optimizer_trains(wrap: str) -> None:
    """With its own step where that may add something, and never by assignment to the wrapper."""
    world, plain = World(OPTIMIZERS[wrap]), World(OPTIMIZERS["plain"])
    step = ss.apply(PLAN, world.model, world.optimizer, loss=World.plain_of)
    world.inner.zero_grad()
    torch.manual_seed(1)
    step(world.batch)
    torch.manual_seed(1)
    plain.inner.zero_grad()
    World.plain_of(plain.model, plain.batch).backward()
    plain.inner.step()
    for found, expected in zip(world.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert getattr(world.optimizer, "steps", 1) == 1
    assert step.optimizer is world.inner


def test_sixteen_bits_do_not_leave_a_wrappers_step_out() -> None:
    world = World(Wrapped)
    with pytest.raises(InputError, match=r"step of\s+Wrapped"):
        ss.apply([Precision("bf16")], world.model, world.optimizer, loss=World.plain_of)


def test_lists_within_what_a_loss_refers_to_are_put_back() -> None:
    """As trainers note values: an object, its modes, their names, a list for each."""

    class Trainer:
        def __init__(self) -> None:
            self.metrics: dict[str, Any] = {"train": {"accuracy": []}}

        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            self.metrics["train"]["accuracy"].append(1.0)
            return model(batch).mean()

    trainer = Trainer()
    passes = lambda *given: trainer.loss(*given)  # noqa: E731
    model = nn.Linear(4, 4)
    step = ss.apply(
        [ss.Microbatching(2)], model, torch.optim.SGD(model.parameters()),
        loss=lambda *given: passes(*given),
    )  # fmt: skip
    step(torch.randn(4, 4))
    assert trainer.metrics["train"]["accuracy"] == [1.0, 1.0]  # of two microbatches, not of tests


def test_hooks_of_a_copy_do_not_stay_on_the_optimizer() -> None:
    world = World(OPTIMIZERS["plain"])
    before = world.fingerprint()
    saved = copy.deepcopy(world.inner.state_dict())
    ss.verify([Offload(smallest=1)], world.model, [world.batch], loss=World.plain_of,
              optimizer=world.optimizer, steps=1)  # fmt: skip
    assert world.fingerprint() == before
    torch.testing.assert_close(world.inner.state_dict(), saved, rtol=0, atol=0)


class Momentum(nn.Module):
    """As MoCo: the average is assigned to `data`, and where the queue ends is read."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.average = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("end", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        follow(self.online, self.average)
        start = int(self.end)
        self.end[0] = (start + len(x)) % 64
        made: torch.Tensor = self.online(x) - self.average(x)
        return made


def follow(online: nn.Module, average: nn.Module) -> None:
    for fast, slow in zip(online.parameters(), average.parameters(), strict=True):
        slow.data = slow.data * 0.9 + fast.data * 0.1


def _verify_plain(world: Any, loss: Any) -> None:
    found = ss.verify([], world.model, [world.batch], loss=loss, optimizer=world.optimizer, steps=1)
    assert found.ok


@pytest.mark.parametrize("call", [_profile, _measure, _plan, _verify_plain])
def test_data_that_is_set_is_put_back(call: Callable[[Any, Any], None]) -> None:
    """Of the model, which runs for real if it reads values, and of a network in the loss."""

    class Given:
        model, batch = nn.Sequential(Momentum(), nn.Linear(8, 8)), torch.randn(16, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    teacher = nn.Linear(8, 8)
    given: Any = Given()

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            follow(model[1], teacher)  # type: ignore[index]
        made: torch.Tensor = (model(batch) - teacher(batch).detach()).square().mean()
        return made

    held = [*given.model.parameters(), *teacher.parameters()]
    before = [(type(p.data), p.data_ptr(), p.tolist()) for p in held]
    call(given, loss)
    assert [(type(p.data), p.data_ptr(), p.tolist()) for p in held] == before


class Observed(nn.Module):
    """As prepared for 8 bits: ranges of rows, which a kernel resizes in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        for name, values in {
            "on": torch.ones(1, dtype=torch.long), "low": torch.empty(0), "high": torch.empty(0),
            "scale": torch.ones(1), "zero": torch.zeros(1, dtype=torch.int32),
        }.items():  # fmt: skip
            self.register_buffer(name, values)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.fused_moving_avg_obs_fake_quant(
            self.linear.weight, self.on, self.on, self.low, self.high, self.scale, self.zero,
            0.01, -128, 127, 0, True, True,
        )  # fmt: skip
        return F.linear(x, weight, self.linear.bias)


@pytest.mark.parametrize("call", [_measure, _plan, _verify_plain])
def test_buffers_that_a_step_resizes_are_as_before(call: Callable[[Any, Any], None]) -> None:
    class Given:
        model, batch = nn.Sequential(Observed(), nn.Linear(8, 8)), torch.randn(16, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    given: Any = Given()
    before = [b.tolist() for b in given.model.buffers()]
    call(given, World.plain_of)
    assert [b.tolist() for b in given.model.buffers()] == before
