"""Which outputs of a block are made again, and that blocks written in any style stay exact."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from chains import chain_of
from shoestring.memory.model import memory_profile
from shoestring.step.apply import apply
from shoestring.techniques import Checkpointing
from shoestring.trace.tracing import trace_model


class Bottleneck(nn.Module):
    """As torchvision writes it: in-place ReLUs, and an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(32, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return F.relu(y, inplace=True)


class Rectified(Bottleneck):
    """The same, nothing in place."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class Written(nn.Module):
    """A normalization, an activation and a gate out of elementary functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.up, self.gate = nn.Linear(32, 96), nn.Linear(32, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        spread = wide.pow(2).mean(-1, keepdim=True)
        y = self.weight * (wide * torch.rsqrt(spread + 1e-6)).to(x.dtype)
        g = self.gate(y)
        inner = math.sqrt(2 / math.pi) * (g + 0.044715 * torch.pow(g, 3.0))
        return x + self.down(0.5 * g * (1.0 + torch.tanh(inner)) * self.up(y))


class Rotated(nn.Module):
    """Positions by complex numbers, and a number times its conjugate: the same bytes read anew."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(F.gelu(self.norm(x)).unflatten(-1, (16, 2)))
        turned = pairs * torch.polar(torch.ones(16), torch.arange(16.0))
        size = (turned.conj() * turned * turned).imag
        return x + self.linear(torch.view_as_real(turned).flatten(-2)) * size.repeat(1, 1, 2)


class Sliced(nn.Module):
    """An activation in place on a part of what another function made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.linear(x))
        F.relu(y[..., :4], inplace=True)
        return x + self.out(y)


def model_of(block: type[nn.Module], count: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    size = (4, 16, 32) if block in (Written, Rotated, Sliced) else (4, 32, 6, 6)
    blocks = nn.ModuleList(block() for _ in range(count))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            for one in self.blocks:
                x = one(x)
            return x

    return Model(), torch.randn(size)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


class Calls(TorchDispatchMode):
    """Counts operations, those of the backward pass apart."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.backward if self.in_backward else self.forward)[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def run(schedule: str, model: nn.Module, batch: Tensor) -> tuple[list[Tensor], Calls]:
    ours = copy.deepcopy(model)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step = apply([Checkpointing.parse(schedule)], ours, optimizer, loss=loss)
    with Calls() as calls:
        found = step._setup.run(batch)
        calls.in_backward = True
        found.backward()
    return [p.grad for p in ours.parameters() if p.grad is not None], calls


SCHEDULES = [
    "no-bn",
    "cheap*3",
    "lean*3",
    "[lean], [cheap]*2",
    "[cheap*2, lean]",
    "[[lean]*2], keep",
]


@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("block", [Bottleneck, Rectified, Written, Rotated, Sliced])
def test_gradients_are_those_of_plain_training(block: type[nn.Module], schedule: str) -> None:
    model, batch = model_of(block)
    loss(model, batch).backward()
    found, _ = run(schedule, model, batch)
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("strategy", ["residual-1*", "residual-2*"])
def test_what_is_recomputed_does_not_hang_on_addresses(strategy: str) -> None:
    """A region that runs again frees less than the first pass did, so storages lie elsewhere."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    for seed in range(6):
        torch.manual_seed(seed)
        model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        ours, batch = copy.deepcopy(model), torch.randn(12, 7, 16)
        step = apply(
            [Checkpointing(strategy)],
            ours,
            torch.optim.SGD(ours.parameters(), lr=0.01),
            loss=loss,
        )
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(4):
            step(batch)
            plain.zero_grad()
            loss(model, batch).backward()
            plain.step()
        for one, other in zip(model.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", ["cheap*3", "lean*3", "[lean]*3", "every-3"])
@pytest.mark.parametrize("block", [Bottleneck, Written])
def test_types_that_autocast_chose_are_chosen_again(block: type[nn.Module], schedule: str) -> None:
    model, batch = model_of(block)

    def cast(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    ours = copy.deepcopy(model)
    cast(model, batch).backward()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    step = apply([Checkpointing.parse(schedule)], ours, optimizer, loss=cast)
    step._setup.run(batch).backward()
    for plain, again in zip(model.parameters(), ours.parameters(), strict=True):
        assert plain.grad is not None and again.grad is not None
        assert torch.equal(plain.grad, again.grad)


@pytest.mark.parametrize("block", [Bottleneck, Rectified])
def test_the_output_of_a_block_is_not_recomputed(block: type[nn.Module]) -> None:
    """The next block keeps it; of two ReLUs in a block one is made again."""
    _, calls = run("cheap*3", *model_of(block))
    again = calls.backward["aten.relu"] + calls.backward["aten.relu_"]
    assert again == 3
    assert calls.backward["aten.convolution"] == 0


def test_lean_makes_wide_products_again_and_no_others() -> None:
    _, calls = run("lean*3", *model_of(Bottleneck))
    assert calls.backward["aten.convolution"] == 3  # 8 to 32 channels, not 32 to 8


def test_each_leaf_keeps_less_and_runs_more() -> None:
    for block in (Bottleneck, Written):
        model, batch = model_of(block)
        chain = chain_of([], model, batch, loss=loss, optimizer="sgd")
        for stage in chain.blocks:
            kept = [stage.options[name].kept_bytes for name in ("keep", "cheap", "lean")]
            moved = [stage.options[name].backward.bytes_moved for name in ("keep", "cheap", "lean")]
            assert kept == sorted(kept, reverse=True) and len(set(kept)) == 3
            assert moved == sorted(moved) and len(set(moved)) == 3


def test_functions_written_out_are_as_cheap_as_named_ones() -> None:
    """Kept are the sum of the block, the two wide products and a number a row."""
    model, batch = model_of(Written)
    chain = chain_of([], model, batch, loss=loss, optimizer="sgd")
    rows = batch.numel() // 32
    option = chain.blocks[1].options["cheap"]
    assert option.kept_bytes <= 4 * rows * (32 + 2 * 96 + 2) + 64
    assert chain.blocks[1].options["keep"].kept_bytes > 2 * option.kept_bytes


class Plain(nn.Module):
    """As wide inside as outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + F.gelu(y) * y


class Overwriting(Plain):
    """Legal in plain training: tanh's gradient reads its output."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = torch.tanh(y)
        y.mul_(2)
        return z * z + y


@pytest.mark.parametrize(
    ("block", "options"), [(Plain, {"keep", "cheap"}), (Overwriting, {"keep"})]
)
def test_blocks_have_the_leaves_that_keep_less_and_work(
    block: type[nn.Module], options: set[str]
) -> None:
    """No product is wide in the one, and the other changes in place what it has read."""
    model = nn.Sequential(*(block() for _ in range(3)))
    chain = chain_of(
        [], model, torch.randn(4, 8), loss=loss, optimizer="sgd", blocks=("0", "1", "2")
    )
    assert all(set(stage.options) == options for stage in chain.blocks)


def test_a_tensor_that_changed_is_named_and_not_used() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Overwriting(), Overwriting())
    step = apply(
        [Checkpointing.parse("cheap*2")],
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
    )
    with pytest.raises(RuntimeError, match=r"shape \(4, 8\) was changed in place.*keep the block"):
        step(torch.randn(4, 8))


class Routed(nn.Module):
    """A norm written out, then new tensors that are filled in place, as experts are called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        spread = x.square().mean(-1, keepdim=True)
        made = self.inner(x * torch.rsqrt(spread + 1e-6))
        spread = made = F.silu(made * torch.rsqrt(made.square().mean(-1, keepdim=True) + 1e-6))
        for _ in range(8):  # in the storages of tensors that are gone by now
            filled = [torch.zeros(len(x), 1) for _ in range(8)]
            for each in filled:
                each.fill_(1.0)
        return x + self.outer(made * filled[0])


def test_a_tensor_that_lies_where_another_was_is_not_that_one() -> None:
    """Within a region that keeps its inputs elsewhere, addresses come again."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Routed(16) for _ in range(3))), torch.randn(8, 16)
    made, _ = run("[cheap]*2, cheap", model, batch)
    plain, _ = run("keep*3", model, batch)
    assert all(torch.equal(a, b) for a, b in zip(made, plain, strict=True))


def test_the_modules_before_the_blocks_are_stages_unless_blocks_are_named() -> None:
    model, _ = model_of(Bottleneck)
    stem = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 1))
    whole = nn.ModuleDict({"stem": stem, "rest": model})

    def run(model: nn.Module, batch: Tensor) -> Tensor:
        assert isinstance(model, nn.ModuleDict)
        return loss(model["rest"], model["stem"](batch))

    images = torch.randn(4, 3, 6, 6)
    found = chain_of([], whole, images, loss=run, optimizer="sgd")
    names = [stage.name for stage in found.blocks]
    assert names == ["stem", *(f"rest.blocks.{i}" for i in range(3))]
    assert "lean" in found.blocks[0].options
    given = tuple(names[1:])
    named = chain_of([], whole, images, loss=run, optimizer="sgd", blocks=given)
    assert tuple(stage.name for stage in named.blocks) == given


class Inverted(nn.Module):
    """Wide inside, with its activations first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 96, 1), nn.BatchNorm2d(96), nn.ReLU(),
            nn.Conv2d(96, 32, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.body(x))


def test_counted_lean_blocks_hold_less_than_cheap_ones() -> None:
    model, batch = model_of(Inverted)
    trace = trace_model(model, batch, loss=loss)

    def counted(schedule: str) -> tuple[int, int]:
        profile = memory_profile(dataclasses.replace(trace, checkpoint=schedule))
        return profile.peak_bytes, profile.recompute_flops

    keep, cheap, lean = (counted(f"{leaf}*3") for leaf in ("keep", "cheap", "lean"))
    assert lean[0] < cheap[0] < keep[0]
    assert lean[1] > cheap[1] > keep[1] == 0


@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
@pytest.mark.parametrize("schedule", ["no-bn", "cheap*3", "[keep]*3", "[cheap*3]"])
def test_running_statistics_move_once(schedule: str) -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(32, 32, 1)
            self.norm = nn.InstanceNorm2d(32, affine=True, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(cast(Tensor, self.norm(self.conv(x))))

    model, batch = model_of(Normalized)
    ours = copy.deepcopy(model)
    loss(model, batch).backward()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    apply([Checkpointing.parse(schedule)], ours, optimizer, loss=loss)(batch)
    for (name, plain), found in zip(model.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(plain, found), name
