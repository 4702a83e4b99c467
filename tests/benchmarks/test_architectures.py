"""Every architecture of the comparison trains, for real and on fake tensors."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from architectures import ARCHITECTURES, HUGGINGFACE_NAMES, Architecture
from architectures.special import Experts

BATCH = 2
EVERY = 4
"""One architecture in so many is in the quick tests."""

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="Hugging Face models need transformers"
)
architectures = pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(
            a,
            id=name,
            marks=[needs_transformers] * (name in HUGGINGFACE_NAMES)
            + [pytest.mark.slow] * (number % EVERY > 0),
        )
        for number, (name, a) in enumerate(ARCHITECTURES.items())
    ],
)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """Draw the same weights and batches every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def backward(architecture: Architecture) -> tuple[torch.nn.Module, torch.Tensor]:
    """Build, then loss and backward."""
    model = architecture.build()
    loss = architecture.loss(model, architecture.batch(BATCH))
    loss.backward()
    return model, loss


def check_gradients(model: torch.nn.Module) -> None:
    """A gradient for each trainable parameter and for no other."""
    assert any(parameter.requires_grad for parameter in model.parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        if parameter.grad is not None:
            assert parameter.grad.shape == parameter.shape, name


@architectures
def test_real_step(architecture: Architecture) -> None:
    model, loss = backward(architecture)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    check_gradients(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name


@architectures
def test_step_on_fake_tensors(architecture: Architecture) -> None:
    with FakeTensorMode():
        model, loss = backward(architecture)
        check_gradients(model)
    assert loss.shape == ()


def test_names_and_batch_sizes() -> None:
    for name, architecture in ARCHITECTURES.items():
        assert architecture.name == name
        assert 0 < architecture.default_batch < architecture.large_batch
        assert architecture.note


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("lenet", 61_706),
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("depthwise", 3_504_872),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    with FakeTensorMode():
        model = ARCHITECTURES[name].build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_experts_mix_the_two_chosen() -> None:
    experts = Experts(width=8, experts=4, hidden=16)
    # Eight tokens in pairs of choices: within capacity, so none is dropped.
    with torch.no_grad():
        experts.router.weight.copy_(torch.eye(4, 8))
    tokens = torch.full((8, 8), -1.0)
    for index in range(8):
        tokens[index, index % 4] = 2.0
        tokens[index, (index + 1) % 4] = 1.0
    gates = torch.softmax(tokens[:, :4], -1)
    expected = torch.zeros_like(tokens)
    for index in range(8):
        first, second = index % 4, (index + 1) % 4
        total = gates[index, first] + gates[index, second]
        for chosen in (first, second):
            hidden = torch.nn.functional.gelu(tokens[index] @ experts.expand[chosen])
            weight = gates[index, chosen] / total
            expected[index] += weight.item() * (hidden @ experts.project[chosen]).detach()
    torch.testing.assert_close(experts(tokens.unsqueeze(0))[0], expected)


def test_frozen_parts() -> None:
    model = ARCHITECTURES["frozen"].build()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        "head.weight",
        "head.bias",
    }


def test_importing_does_not_import_transformers() -> None:
    root = Path(__file__).resolve().parents[2] / "benchmarks"
    code = "import sys, architectures; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
