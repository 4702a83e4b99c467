"""Sparse training against masks over dense weights, and what it leaves alone."""

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reference.masked_dense import MaskedDense
from shoestring.step.apply import apply
from shoestring.techniques import Checkpointing, Microbatching, Sparsity
from shoestring.techniques.sparsity import sparse_tensors, to_dense
from shoestring.techniques.sparsity.tensor import random_positions
from shoestring.trace.blocks import sparsifiable_names

from .small_models import CASES, OPTIMIZERS, build

EVERY_3 = ((1000, 3),)


@pytest.fixture
def double() -> Iterator[None]:
    """Double precision, so that a threshold splits both implementations at the same weights."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", ["dsr", "set", "static"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_equal_to_masked_dense_training(
    case: str, optimizer: str, method: str, double: None
) -> None:
    _, batch_of, loss = CASES[case]
    model = build(case)
    plain = copy.deepcopy(model)
    settings = Sparsity(
        0.4, method=method, seed=3, schedule=EVERY_3, fraction_multiplier=5.0, threshold=0.01
    )
    step = apply([settings], model, OPTIMIZERS[optimizer](model), loss=loss)
    tensors = sparse_tensors(model)
    assert set(tensors) == sparsifiable_names(plain) & {n for n, _ in plain.named_parameters()}

    generator = torch.Generator().manual_seed(3)
    for tensor in tensors.values():  # the draws of the first pattern
        random_positions(torch.ones(tensor.numel) > 0, tensor.nonzeros, generator)
    masks = {name: t.mask().view(t.shape) for name, t in tensors.items()}
    reference = MaskedDense(
        plain,
        OPTIMIZERS[optimizer](plain),
        masks,
        lambda free, count: random_positions(free, count, generator),
        threshold=0.01,
        fraction=5 * 0.01377866,
    )
    total = sum(t.nonzeros for t in tensors.values())
    for number in range(1, 11):
        batch = batch_of(number)
        expected = reference.step(lambda m, batch=batch: loss(m, batch))
        assert step(batch).item() == pytest.approx(expected, rel=1e-9)
        if number % 3 == 0 and method != "static":
            reference.rewire_dsr() if method == "dsr" else reference.rewire_set()
        assert sum(t.nonzeros for t in tensors.values()) == total
        for name, tensor in tensors.items():
            assert torch.equal(tensor.mask().view(tensor.shape), reference.masks[name]), name
    assert method == "static" or step.state_dict()["techniques"]["sparsity"]["rewired"] > 20
    state = to_dense(model)
    assert list(state) == list(plain.state_dict())
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-7, atol=1e-9)


def test_one_step_in_single_precision() -> None:
    """The functions' gradients are those of a dense model with zeros, to rounding."""
    _, batch_of, loss = CASES["convolutions"]
    model = build("convolutions")
    optimizer = OPTIMIZERS["sgd"](model)
    apply([Sparsity(0.3)], model, optimizer, loss=loss)
    plain = build("convolutions")
    plain.load_state_dict(to_dense(model))
    batch = batch_of(1)
    loss(model, batch).backward()
    loss(plain, batch).backward()
    dense = dict(plain.named_parameters())
    for name, tensor in sparse_tensors(model).items():
        expected = dense[name].grad
        assert expected is not None
        assert tensor.values.grad is not None
        torch.testing.assert_close(
            tensor.values.grad, expected.flatten()[tensor.mask()], rtol=1e-5, atol=1e-7
        )


def test_density_one_changes_nothing() -> None:
    model = build("tied")
    optimizer = OPTIMIZERS["sgd"](model)
    before = {name: id(p) for name, p in model.named_parameters()}
    classes = [type(m) for m in model.modules()]
    step = apply([Sparsity(1.0)], model, optimizer, loss=CASES["tied"][2])
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert [type(m) for m in model.modules()] == classes
    assert "sparsity" not in step.state_dict()["techniques"]


def test_the_optimizer_and_its_scheduler_go_on() -> None:
    """State from before is gathered; groups, scheduler and the parameter objects are the same."""
    _, batch_of, loss = CASES["convolutions"]
    model = build("convolutions")
    convolutions = [p for p in model.parameters() if p.dim() == 4]
    others = [p for p in model.parameters() if p.dim() != 4]
    optimizer = torch.optim.Adam([{"params": convolutions, "lr": 1e-2}, {"params": others}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss(model, batch_of(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    moment = optimizer.state[convolutions[1]]["exp_avg"].clone()
    step = apply([Sparsity(0.25)], model, optimizer, loss=loss)
    tensor = next(iter(sparse_tensors(model).values()))
    assert tensor.values is convolutions[1]
    assert optimizer.param_groups[0]["params"][1] is tensor.values
    held = optimizer.state[tensor.values]
    assert torch.equal(held["exp_avg"], moment.flatten()[tensor.mask()])
    assert float(held["step"]) == 1
    step(batch_of(1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 5e-3
    assert all(s["exp_avg"].shape == p.shape for p, s in optimizer.state.items() if "exp_avg" in s)


@pytest.mark.parametrize(
    "kind",
    "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop Adafactor".split(),
)
def test_every_elementwise_optimizer(kind: str) -> None:
    _, batch_of, loss = CASES["tied"]
    model = build("tied")
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    settings = Sparsity(0.4, schedule=EVERY_3, threshold=0.05)
    step = apply([settings], model, optimizer, loss=loss)
    losses = [step(batch_of(0)).item() for _ in range(20)]
    assert losses[-1] < losses[0]


def test_a_plain_loop_that_holds_its_loss() -> None:
    """The loss of the step before is still referenced when the sizes change."""
    _, batch_of, loss = CASES["tied"]
    model = build("tied")
    optimizer = OPTIMIZERS["sgd"](model)
    settings = Sparsity(0.4, schedule=((100, 1),), threshold=0.1)
    step = apply([settings], model, optimizer, loss=loss)
    sizes = set()
    for number in range(5):
        value = loss(model, batch_of(number))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        for call in step._setup.after_update:
            call()
        sizes.add(tuple(t.nonzeros for t in sparse_tensors(model).values()))
    assert len(sizes) > 1


def test_rewiring_between_forward_and_backward_is_an_error() -> None:
    _, batch_of, loss = CASES["tied"]
    model = build("tied")
    step = apply([Sparsity(0.4, threshold=0.1)], model, OPTIMIZERS["sgd"](model), loss=loss)
    value = loss(model, batch_of(0))
    step._setup.state["sparsity"].rewire()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="rewired between"):
        value.backward()


@pytest.mark.parametrize("strategy", ["no-bn", "every-2", "residual-2", "residual-2*"])
def test_recomputed_gradients_are_the_same_bits(strategy: str) -> None:
    _, batch_of, loss = CASES["convolutions"]
    states = []
    for techniques in ([Sparsity(0.3)], [Sparsity(0.3), Checkpointing(strategy)]):
        model = build("convolutions")
        step = apply(techniques, model, OPTIMIZERS["sgd"](model), loss=loss)
        for number in range(3):
            step(batch_of(number))
        states.append(model.state_dict())
    for name, expected in states[0].items():
        assert torch.equal(states[1][name], expected), name


def test_microbatches_add_up() -> None:
    _, batch_of, loss = CASES["tied"]
    states = []
    for techniques in ([Sparsity(0.3)], [Sparsity(0.3), Microbatching(2)]):
        model = build("tied")
        step = apply(techniques, model, OPTIMIZERS["sgd"](model), loss=loss)
        step(batch_of(0))
        states.append(model.state_dict())
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected)


def _saved_shapes(model: nn.Module, loss: Any, batch: Any) -> tuple[Tensor, list[torch.Size]]:
    shapes: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return loss(model, batch), shapes


@pytest.mark.parametrize("case", ["convolutions", "tied"])
def test_no_dense_weight_outlives_its_kernel(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoestring.techniques.sparsity.tensor import SparseTensor

    _, batch_of, loss = CASES[case]
    model = build(case)
    apply([Sparsity(0.3)], model, OPTIMIZERS["sgd"](model), loss=loss)
    made: list[weakref.ref[Any]] = []
    plain = SparseTensor.dense

    def watched(self: SparseTensor, *args: Any) -> Tensor:
        assert not any(reference() is not None for reference in made)
        dense = plain(self, *args)
        made.append(weakref.ref(dense.untyped_storage()))
        return dense

    monkeypatch.setattr(SparseTensor, "dense", watched)
    value, shapes = _saved_shapes(model, loss, batch_of(0))
    uses = len(made)
    assert uses == (9 if case == "convolutions" else 3)
    assert not any(reference() is not None for reference in made)
    dense = {t.shape for t in sparse_tensors(model).values()}
    assert not dense & set(shapes)
    value.backward()
    assert len(made) == uses + (9 if case == "convolutions" else 2)  # an embedding needs no weight
    assert not any(reference() is not None for reference in made)


def test_a_seed_decides_everything() -> None:
    _, batch_of, loss = CASES["tied"]

    def run(seed: int) -> dict[str, Tensor]:
        model = build("tied")
        settings = Sparsity(0.4, seed=seed, schedule=EVERY_3, threshold=0.1)
        step = apply([settings], model, OPTIMIZERS["adam"](model), loss=loss)
        for number in range(7):
            step(batch_of(number))
        return to_dense(model)

    first, same, other = run(1), run(1), run(2)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_state_goes_on_exactly(optimizer: str) -> None:
    _, batch_of, loss = CASES["tied"]
    settings = Sparsity(0.4, schedule=EVERY_3, threshold=0.1)

    def begin() -> Any:
        model = build("tied")
        return apply([settings], model, OPTIMIZERS[optimizer](model), loss=loss)

    one = begin()
    for number in range(5):
        one(batch_of(number))
    state = copy.deepcopy(one.state_dict())
    two = begin()
    two.load_state_dict(state)
    for number in range(5, 12):
        assert torch.equal(one(batch_of(number)), two(batch_of(number)))
    for name, expected in one.model.state_dict().items():
        assert torch.equal(two.model.state_dict()[name], expected)
    assert one._setup.state["sparsity"].rewirings == two._setup.state["sparsity"].rewirings == 4


def test_scales_and_normalizations_stay_dense() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 1, 1))
            self.first = nn.Parameter(torch.zeros(1, 1, 8))
            self.table = nn.Parameter(torch.zeros(1, 9, 8))

    def linear() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    model = nn.Sequential(
        nn.Linear(8, 1), nn.LayerNorm([4, 8]), nn.GroupNorm(2, 4), Scaled(), linear()
    )
    assert sparsifiable_names(model) == {
        "0.weight", "3.table", "4.parametrizations.weight.original1",
    }  # fmt: skip
