"""Recomputation ends before a sparse product that nobody reads again, as before a dense one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shoestring.lab.models import builtin
from shoestring.step.apply import apply
from shoestring.step.predict import predict_step
from shoestring.step.step import Step
from shoestring.techniques import Checkpointing, Microbatching, Sparsity, Technique
from shoestring.techniques.sparsity import sparse_tensors
from shoestring.techniques.sparsity.tensor import SparseTensor

STRATEGIES = ["no-bn", "every-2", "every-6", "residual-1", "residual-2", "residual-1*",
              "residual-2*"]  # fmt: skip
WRN = builtin("wrn-16-1")


class Counter(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] = self.calls.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def begin(*techniques: Technique) -> Step:
    torch.manual_seed(0)
    model = WRN.build()
    return apply(list(techniques), model, torch.optim.SGD(model.parameters()), loss=WRN.loss)


def convolutions(step: Step, batch: Any) -> int:
    with Counter() as counter:
        step(batch)
    return counter.calls[torch.ops.aten.convolution.default]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_much_runs_again_as_with_dense_weights(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, scatters, plain = WRN.batch(2), [], SparseTensor.dense

    def counted(self: SparseTensor, *args: Any) -> Tensor:
        scatters.append(self.name)
        return plain(self, *args)

    monkeypatch.setattr(SparseTensor, "dense", counted)
    expected = convolutions(begin(Checkpointing(strategy)), batch)
    step = begin(Sparsity(0.3, method="static"), Checkpointing(strategy))
    assert convolutions(step, batch) == expected
    tensors = len(sparse_tensors(step.model))
    assert tensors == 12  # all but the first, which runs once; each once more in backward
    assert len(scatters) == expected - 1 + tensors


def test_microbatches_run_no_more_again() -> None:
    counts = [
        convolutions(begin(*more, Microbatching(1), Checkpointing("residual-2*")), WRN.batch(2))
        for more in ((), (Sparsity(0.3),))
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_the_same_bits(strategy: str, frozen: bool) -> None:
    """Also where every second sparse weight gets no gradient, and the first layer none at all."""
    batch = WRN.batch(2)
    found = []
    for more in ((), (Checkpointing(strategy),)):
        step = begin(Sparsity(0.3), *more)
        if frozen:
            step.model.conv.requires_grad_(False)
            for tensor in list(sparse_tensors(step.model).values())[::2]:
                tensor.values.requires_grad_(False)
        step._setup.run(batch).backward()
        found.append([p.grad for p in step.model.parameters()])
    assert (None in found[0]) == frozen
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)


class Widening(nn.Module):
    """A block whose output is four times what its last layer reads."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.down = nn.Linear(32, 8) if flat else nn.Conv2d(32, 8, 1)
        self.up = nn.Linear(8, 32) if flat else nn.Conv2d(8, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.relu(self.down(x)))


@pytest.mark.parametrize("strategy", ["residual-1", "residual-2*"])
@pytest.mark.parametrize("flat", [False, True])
def test_a_block_s_output_is_not_at_the_peak(strategy: str, flat: bool) -> None:
    """Activations of a dense model, and one dense weight."""
    batch = torch.randn((4, 64, 32) if flat else (4, 32, 8, 8))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).flatten(1).mean(1).square().sum()  # keeps no output of a block

    activations = []
    for more in ((), (Sparsity(0.3),)):
        torch.manual_seed(0)
        model = nn.Sequential(*(Widening(flat) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters())
        techniques = [*more, Checkpointing(strategy, blocks=("0", "1", "2"))]
        predicted = predict_step(techniques, model, batch, loss=loss, optimizer=optimizer)
        step = apply(techniques, model, optimizer, loss=loss)
        step(batch)
        measured = step.measure(batch)
        assert measured.peak_bytes == predicted.peak_bytes
        roles = measured.bytes_by_role
        activations.append(roles["forward_activation"] + roles["backward_activation"])
    weight, output = 4 * 8 * 32, 4 * batch.numel()
    assert activations[1] - activations[0] <= 2 * weight < output


def layer(kind: str) -> tuple[nn.Module, Tensor, Any]:
    """A sparse layer, an input, and its product's operation."""
    made: dict[str, tuple[nn.Module, Tensor, Any]] = {
        "linear": (nn.Linear(6, 5), torch.randn(3, 6), torch.ops.aten.addmm.default),
        "convolution": (
            nn.Conv2d(4, 5, 3), torch.randn(2, 4, 6, 6), torch.ops.aten.convolution.default,
        ),
        "embedding": (
            nn.Embedding(9, 6), torch.tensor([1, 4]), torch.ops.aten.embedding.default,
        ),
    }  # fmt: skip
    module, x, product = made[kind]
    apply(
        [Sparsity(0.4, tensors=("weight",))], module, torch.optim.SGD(module.parameters()),
        loss=lambda m, b: m(b).sum(),
    )  # fmt: skip
    return module, x, product


@pytest.mark.parametrize("kind", ["linear", "convolution", "embedding"])
def test_what_is_saved_is_packed_once_and_before_the_product(kind: str) -> None:
    module, x, product = layer(kind)
    packed: list[tuple[torch.Size, int]] = []

    def run() -> Tensor:
        with Counter() as counter:

            def pack(tensor: Tensor) -> Tensor:
                assert not tensor.requires_grad
                packed.append((tensor.shape, counter.calls.get(product, 0)))
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                out: Tensor = module(x)
        assert counter.calls[product] == 1
        return out

    run().sum().backward()
    (tensor,) = sparse_tensors(module).values()
    assert tensor.values.grad is not None
    saved = [x.shape] if kind == "embedding" else [x.shape, tensor.values.shape]
    assert packed == [(shape, 0) for shape in saved]
    packed.clear()
    with torch.no_grad():
        run()
    module.requires_grad_(False)
    assert not run().requires_grad
    assert packed == []


class Box:
    """A packed tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_backward_lets_go_of_what_was_packed(kind: str) -> None:
    """Though the graph is still held; not where it is to run again."""
    module, x, _ = layer(kind)
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    with saved_tensors_hooks(pack, lambda box: box.tensor):
        out = module(x)
    assert [box() is not None for box in boxes] == [True, True]
    out.backward(torch.ones_like(out), retain_graph=True)
    first = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    out.backward(torch.ones_like(out))
    assert [box() for box in boxes] == [None, None]
    for expected, parameter in zip(first, module.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected)
    with pytest.raises(RuntimeError, match="second time"):
        out.backward(torch.ones_like(out))


def test_a_region_runs_again_for_each_backward() -> None:
    module, x, product = layer("convolution")
    x.requires_grad_()

    def run(x: Tensor) -> Tensor:
        return module(x.sin())

    plain = torch.autograd.grad(run(x).square().sum(), [x, *module.parameters()])
    loss = checkpoint(run, x, use_reentrant=False).square().sum()
    for _ in range(2):
        with Counter() as counter:
            found = torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True)
        assert counter.calls[torch.ops.aten.sin.default] == 1
        assert product not in counter.calls
        for one, other in zip(found, plain, strict=True):
            assert torch.equal(one, other)
