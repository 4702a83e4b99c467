"""What cannot be traced says why, in one line and with the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoestring as ss
from shoestring.errors import InputError, TraceError
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan
from shoestring.trace.tracing import trace_model


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """A loss for any model of one tensor."""
    return model(batch).square().mean()


def test_nothing_to_train() -> None:
    with pytest.raises(InputError, match="none of the model's 2 parameters requires a gradient"):
        trace_model(nn.Linear(4, 2).requires_grad_(False), torch.randn(3, 4), loss=mean_square)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda m, b: m(b), r"must be a scalar, got shape \(3, 2\)"),
        (lambda m, b: 0.0, "must be a tensor, got float"),
        (lambda m, b: m(b).detach().mean(), "does not depend on any trainable parameter"),
        (lambda m, b: b.mean(), "does not depend on any trainable parameter"),
        (lambda m, b: m(b).mean() * 1j, "must be a real number, got torch.complex64"),
    ],
)
def test_losses_that_are_none(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        trace_model(nn.Linear(4, 2), torch.randn(3, 4), loss=loss)
    assert caught.value.hint


def test_a_loss_that_trains_another_model_than_it_is_given() -> None:
    model, batch = nn.Linear(4, 2), torch.randn(3, 4)

    def loss(_: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch)

    for device in ("cpu", "cuda"):
        with pytest.raises(InputError, match="reaches no parameter of the model") as caught:
            trace_model(model, batch, loss=loss, device=device)  # type: ignore[arg-type]
    assert "first argument" in caught.value.hint
    with pytest.raises(InputError, match="reaches no parameter of the model"):
        trace_plan(Plan(()), model, batch, loss=loss, optimizer="sgd", device="cpu")
    assert model.weight.grad is None


def test_optimizer_of_another_model() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    with pytest.raises(InputError, match="parameters that are not the model's"):
        trace_model(nn.Linear(4, 2), torch.randn(3, 4), loss=mean_square, optimizer=optimizer)


def test_parameters_of_the_loss_train_in_one_module_with_the_model() -> None:
    model, head = nn.Linear(4, 2), nn.Bilinear(2, 2, 1)
    batch = torch.randn(3, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(InputError, match="2, the first of shape 1×2×2") as caught:
        trace_model(model, batch, loss=lambda m, b: head(m(b), m(b)).mean(), optimizer=optimizer)
    assert "both = nn.ModuleList([model, head])" in caught.value.hint
    both = nn.ModuleList([model, head])
    trace = trace_model(
        both,
        batch,
        loss=lambda m, b: m[1](m[0](b), m[0](b)).mean(),
        optimizer=torch.optim.SGD(both.parameters(), lr=0.1),
    )
    assert len(trace.parameters) == 4  # a weight and a bias each


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="unknown optimizer 'sgdd'"):
        trace_model(nn.Linear(4, 2), torch.randn(3, 4), loss=mean_square, optimizer="sgdd")
    with pytest.raises(InputError, match=r"must be a torch.nn.Module, got Linear"):
        trace_model(nn.Linear, torch.randn(3, 4), loss=mean_square)
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        trace_model(nn.Linear(4, 2), torch.randn(3, 4), loss=mean_square, device="tpu")


def test_control_flow_by_value_names_the_module() -> None:
    class Choosy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    class Selecting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[x > 0]

    # Without weights no forward pass can tell what is read.
    model = nn.Sequential(nn.Linear(4, 2), nn.Sequential(Choosy())).to("meta")
    with pytest.raises(TraceError, match=r"^1\.0 reads the value of a tensor"):
        trace_model(model, torch.randn(3, 4), loss=mean_square)
    with pytest.raises(TraceError, match=r"^the model reads the value"):
        trace_model(Selecting(4, 4).to("meta"), torch.randn(3, 4), loss=mean_square)
    with pytest.raises(TraceError, match=r"^the loss reads the value"):
        model = nn.Linear(4, 2).to("meta")
        trace_model(model, torch.randn(3, 4), loss=lambda m, b: m(b).sum() * b.sum().item())


def test_failure_of_the_model_is_one_line() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"^the model failed on this batch: ") as caught:
        trace_model(model, torch.randn(3, 5), loss=mean_square)
    assert "\n" not in caught.value.message
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert str(caught.value.__cause__).splitlines()[0] in caught.value.message


@pytest.mark.parametrize("kind", [ValueError, TypeError, IndexError, KeyError, AssertionError])
def test_failure_of_any_kind(kind: type[Exception]) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise kind("first line\nsecond line")

    with pytest.raises(InputError, match=r"the model failed on this batch: .*first line"):
        trace_model(nn.Linear(4, 2), torch.randn(3, 4), loss=loss)


def test_a_missing_key_is_named_as_one() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch["images"]).mean()

    with pytest.raises(InputError, match=r"on this batch: KeyError: 'images'"):
        trace_model(nn.Linear(4, 2), {"image": torch.randn(3, 4)}, loss=loss)


@pytest.mark.parametrize("given", [None, nn.Linear, nn.Linear(2, 2).state_dict()], ids=type)
def test_what_is_no_model(given: Any) -> None:
    optimizer, batch = torch.optim.SGD(nn.Linear(2, 2).parameters()), torch.ones(1, 2)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        ss.measure(given, batch, loss=mean_square, optimizer=optimizer)
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        ss.verify([], given, [batch], loss=mean_square, optimizer=optimizer)


def test_failure_in_backward() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("no gradient here")

    with pytest.raises(InputError, match="no gradient here"):
        trace_model(nn.Linear(4, 2), torch.randn(3, 4), loss=lambda m, b: Broken.apply(m(b)).sum())


def test_model_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 2)
    model.stream = (number for number in range(3))
    with pytest.raises(TraceError, match="could not be copied"):
        trace_model(model, torch.randn(3, 4), loss=mean_square)


def test_sparse_batch() -> None:
    with pytest.raises(InputError, match=r"no accounting for torch\.sparse_coo tensors"):
        trace_model(nn.Linear(4, 2), torch.eye(4).to_sparse(), loss=mean_square)


def test_nested_rows_are_one_line_everywhere() -> None:
    model, rows = nn.Linear(4, 2), [torch.randn(2, 4), torch.randn(3, 4)]
    batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b.values()).square().mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    for call in (
        lambda: ss.profile(model, batch, **given),
        lambda: ss.measure(model, batch, **given),
        lambda: ss.plan(model, batch, budget="1 MB", **given),
        lambda: ss.verify([ss.Microbatching(1)], model, [batch], **given),
    ):
        with pytest.raises(InputError, match=r"no accounting for torch\.jagged") as caught:
            call()
        assert "offsets" in caught.value.hint


def test_a_sparse_matrix_beside_the_model_is_measured() -> None:
    model, edges = nn.Linear(4, 2), torch.eye(6).to_sparse()
    given: dict[str, Any] = {
        "loss": lambda m, b: torch.sparse.mm(edges, m(b)).square().mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    assert ss.measure(model, torch.randn(6, 4), **given).peak_bytes > 0
    plan = ss.plan(model, torch.randn(6, 4), budget="1 MB", **given)
    assert "meta converter" in str(plan.by_running)


def test_a_copy_with_parameters_of_its_own_is_not_traced() -> None:
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    with pytest.raises(TraceError, match=r"parameters of its own: torch\.jit\.script"):
        ss.profile(model, torch.randn(3, 4), loss=mean_square, optimizer="adamw")


def test_only_the_optimizer_is_told_to_ask_for_a_closure() -> None:
    """A model whose own error has that word in it is told that error."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the closure of this set is empty")

    with pytest.raises(ss.InputError, match="the closure of this set"):
        ss.measure(nn.Linear(4, 4), torch.randn(2, 4), loss=loss, optimizer="sgd")
