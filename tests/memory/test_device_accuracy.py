"""Predicted and measured peaks of every architecture: within 1%, and no underestimate over 0.5%."""

from importlib.util import find_spec

import pytest
import torch

from architectures import ARCHITECTURES, HUGGINGFACE_NAMES, Architecture
from shoestring.memory.device import device_timeline
from shoestring.memory.live.measure import measure
from shoestring.trace.tracing import trace_model

LARGEST_ERROR = 0.01
LARGEST_UNDERESTIMATE = 0.005

needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="Hugging Face models need transformers"
)
# Small batches: real steps are what takes time here. benchmarks/profile_accuracy.py has them all.
EVERY = 4
"""One in so many of them is in the quick tests."""
CASES = [
    pytest.param(
        architecture,
        optimizer,
        divisor,
        id=f"{name}-{optimizer}",
        marks=[needs_transformers] * (name in HUGGINGFACE_NAMES)
        + [pytest.mark.slow] * (number % EVERY > 0),
    )
    for number, (name, architecture) in enumerate(ARCHITECTURES.items())
    for optimizer, divisor in [("sgd", 2), ("adam", 4)][: 1 + number % 2]
]


@pytest.mark.parametrize(("architecture", "optimizer", "divisor"), CASES)
def test_peak(architecture: Architecture, optimizer: str, divisor: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = architecture.build()
        batch = architecture.batch(max(architecture.default_batch // divisor, 2))
        trace = trace_model(model, batch, loss=architecture.loss, optimizer=optimizer)
        measured = measure(
            model, batch, loss=architecture.loss, optimizer=optimizer, warmup_steps=1
        )
    timeline = device_timeline(trace)
    predicted_bytes = int(timeline.totals.max())
    error = (predicted_bytes - measured.peak_bytes) / measured.peak_bytes
    assert -LARGEST_UNDERESTIMATE <= error <= LARGEST_ERROR
    # Not only the sum: what the bytes are for agrees as well.
    for role, predicted_role_bytes in timeline.roles_at(timeline.peak_instant).items():
        difference = abs(predicted_role_bytes - measured.bytes_by_role.get(str(role), 0))
        assert difference <= LARGEST_ERROR * measured.peak_bytes, role
