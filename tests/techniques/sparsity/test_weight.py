"""What can be done with a sparse weight, each use against the dense tensor."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.errors import InputError
from shoestring.step.apply import apply
from shoestring.techniques import Sparsity
from shoestring.techniques.sparsity import sparse_tensors, to_dense
from shoestring.techniques.sparsity.weight import SparseWeight


def sparse(model: nn.Module, *names: str, density: float = 0.4) -> tuple[nn.Module, nn.Module]:
    """The model with sparse tensors, and a dense one of equal weights."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply([Sparsity(density, tensors=names)], model, optimizer, loss=lambda m, b: m(b).sum())
    plain.load_state_dict(to_dense(model))
    return model, plain


def assert_same(model: nn.Module, plain: nn.Module, run: Callable[[nn.Module, Tensor], Tensor],
                x: Tensor) -> None:  # fmt: skip
    """Output and every gradient."""
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    outputs = [run(m, i) for m, i in zip((model, plain), inputs, strict=True)]
    torch.testing.assert_close(outputs[0], outputs[1])
    weights = torch.randn_like(outputs[0])
    for output in outputs:
        (output * weights).sum().backward()
    if x.is_floating_point():
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    tensors = sparse_tensors(model)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        expected, found = parameter.grad, dict(model.named_parameters()).get(name)
        if name in tensors:
            found, expected = tensors[name].values, expected.flatten()[tensors[name].mask()]
        assert found is not None
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected, rtol=1e-4, atol=1e-5)


CONVOLUTIONS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    (nn.Conv1d(4, 6, 4, padding="same", dilation=3), (2, 4, 19)),
    (nn.Conv2d(4, 6, 3, stride=2, bias=False), (2, 4, 9, 8)),
    (nn.Conv2d(4, 6, (3, 2), padding="same"), (2, 4, 9, 8)),
    (nn.Conv2d(4, 6, 3, padding="valid"), (4, 9, 8)),
    (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 9, 9)),
    (nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4), (2, 8, 9, 9)),
    (nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    (nn.Conv3d(2, 4, 3, padding=1), (2, 2, 5, 5, 5)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 9)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 5, 5)),
    (nn.ConvTranspose3d(2, 4, 2, stride=2, dilation=2), (2, 2, 3, 3, 3)),
]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS, ids=lambda x: str(x).replace(" ", ""))
def test_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, plain = sparse(copy.deepcopy(layer), "weight")
    assert_same(model, plain, lambda m, x: m(x), torch.randn(shape))


@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    model, plain = sparse(nn.Linear(7, 5, bias=bias), "weight")
    assert_same(model, plain, lambda m, x: m(x), torch.randn(shape))


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "matmul": lambda m, x: torch.matmul(x, m.weight),
    "@": lambda m, x: x @ m.weight,
    "mm": lambda m, x: x.mm(m.weight),
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight),
    "t": lambda m, x: F.linear(x, m.weight.t(), m.bias),
    "T": lambda m, x: x @ m.weight.T.T,
    "mT": lambda m, x: x @ m.weight.mT.mT,
    "transpose": lambda m, x: x @ m.weight.transpose(0, 1).transpose(-1, -2),
    "einsum, falls back": lambda m, x: torch.einsum("ni,io->no", x, m.weight),
    "scaled addmm, falls back": lambda m, x: torch.addmm(m.bias, x, m.weight, alpha=2),
    "left, falls back": lambda m, x: (m.weight.t() @ x.t()).t(),
    "elementwise, falls back": lambda m, x: x @ (m.weight * 2 + 1),
    "norm, falls back": lambda m, x: x @ m.weight / m.weight.norm(),
}


@pytest.mark.parametrize("use", PRODUCTS)
def test_products(use: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(7, 5))
    model.bias = nn.Parameter(torch.randn(5))
    model, plain = sparse(model, "weight")

    def run(module: nn.Module, x: Tensor) -> Tensor:
        return PRODUCTS[use](module, x) + module.bias  # type: ignore[operator]

    assert_same(model, plain, run, torch.randn(3, 7))


@pytest.mark.parametrize("settings", [{}, {"padding_idx": 2}, {"padding_idx": -1},
                                      {"scale_grad_by_freq": True}])  # fmt: skip
def test_embedding(settings: dict[str, Any]) -> None:
    model, plain = sparse(nn.Embedding(9, 6, **settings), "weight")
    ids = torch.tensor([[0, 2, 2], [8, 1, 2]])
    assert_same(model, plain, lambda m, x: m(x), ids)


def test_packed_attention_and_recurrence_fall_back() -> None:
    attention, plain = sparse(nn.MultiheadAttention(8, 2), "in_proj_weight", "out_proj.weight")
    assert_same(attention, plain, lambda m, x: m(x, x, x)[0], torch.randn(3, 2, 8))
    lstm, plain = sparse(nn.LSTM(4, 5, num_layers=2), "weight_ih_l0", "weight_hh_l1")
    assert_same(lstm, plain, lambda m, x: m(x)[0], torch.randn(3, 2, 4))
    lstm.eval()
    attention.eval()
    with torch.no_grad():
        lstm(torch.randn(3, 2, 4))
        attention(*[torch.randn(3, 2, 8)] * 3)


def test_autocast() -> None:
    layers: list[tuple[nn.Module, Tensor]] = [
        (nn.Linear(8, 8), torch.randn(4, 8)),
        (nn.Conv2d(4, 4, 3), torch.randn(2, 4, 6, 6)),
    ]
    for layer, x in layers:
        model, plain = sparse(layer, "weight")

        def run(module: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out: Tensor = module(x)
            assert out.dtype is torch.bfloat16
            return out.float()

        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for module, given in zip((model, plain), inputs, strict=True):
            run(module, given).sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=0.02, atol=0.02)
        (tensor,) = sparse_tensors(model).values()
        assert tensor.values.grad is not None
        assert tensor.values.grad.dtype is torch.float32


def test_it_looks_like_a_weight() -> None:
    model, plain = sparse(nn.Linear(7, 5), "weight")
    weight = model.weight
    assert isinstance(weight, SparseWeight)
    assert weight.shape == (5, 7)
    assert weight.t().shape == (7, 5)
    assert (weight.dtype, weight.device, weight.requires_grad, weight.numel(), len(weight)) == (
        torch.float32, torch.device("cpu"), True, 35, 5,
    )  # fmt: skip
    assert torch.equal(weight.detach(), plain.weight.detach())  # type: ignore[arg-type,operator]
    assert (weight.untyped_storage().nbytes(), weight.storage_offset(), weight._version) == (0,) * 3
    assert "SparseWeight" not in repr(model)
    assert weight.grad is None
    model(torch.ones(7)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (5, 7)
    for write in (
        lambda: weight.mul_(2),
        lambda: nn.init.zeros_(weight),
        lambda: weight.__setitem__(0, 1),
        lambda: weight.requires_grad_(False),
    ):
        with pytest.raises(InputError, match="would write to a copy"):
            write()


def test_types_and_copies() -> None:
    """`half`, `deepcopy` and pickles keep a shared weight shared."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    model[1].weight = model[0].weight
    sparse_model, _ = sparse(model, "0.weight")
    sparse_model.double()
    for module in (copy.deepcopy(sparse_model), pickle.loads(pickle.dumps(sparse_model))):
        assert module(torch.tensor([1])).dtype is torch.float64
        assert module[0].weight_values is module[1].weight_values
        assert module[0].weight_index is module[1].weight_index
        (tensor,) = sparse_tensors(module).values()
        assert tensor.values is module[0].weight_values
        assert tensor.index is module[0].weight_index
        assert tensor.values is not sparse_model[0].weight_values  # type: ignore[index]
    assert len(list(sparse_model.parameters())) == 1
    assert type(sparse_model[0]).__name__ == "Embedding"  # type: ignore[index]


def test_autocast_lowers_the_input_of_a_16_bit_weight_too() -> None:
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply([Sparsity(0.5, tensors=("weight",))], model, optimizer, loss=lambda m, b: m(b).sum())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.randn(3, 8)).sum()
    loss.backward()
    assert model.weight_values.grad.isfinite().all()
