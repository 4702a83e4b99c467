"""The mean of several states."""

import pytest
import torch

from shoestring.errors import InputError
from shoestring.lab.runs.average import mean_of


def test_the_mean_of_three():
    states = [{"a": torch.randn(4, 3), "n": torch.tensor([7, 8])} for _ in range(3)]
    made, count = mean_of(states)
    assert count == 3
    assert torch.allclose(made["a"], torch.stack([s["a"] for s in states]).mean(0), atol=1e-6)
    assert made["n"].tolist() == [7, 8] and made["a"].dtype is torch.float32


def test_half_precision_rounds_once():
    values = torch.rand(1000, dtype=torch.float64) + 1
    states = [{"a": values.to(torch.float16)}, {"a": (values + 0.001).to(torch.float16)}]
    made, _ = mean_of(states)
    exact = (states[0]["a"].double() + states[1]["a"].double()) / 2
    assert made["a"].equal(exact.to(torch.float16))


def test_weights_with_other_nonzeros_are_left_out():
    """Two were made before a rewiring: the newest's places decide."""
    newest = {"w_values": torch.tensor([1.0, 2.0]), "w_index": torch.tensor([3, 4])}
    same = {"w_values": torch.tensor([3.0, 4.0]), "w_index": torch.tensor([3, 4])}
    older = {"w_values": torch.tensor([9.0, 9.0]), "w_index": torch.tensor([1, 4])}
    made, count = mean_of([newest, same, older])
    assert count == 2 and made["w_values"].tolist() == [2.0, 3.0]


def test_nothing_to_average():
    with pytest.raises(InputError, match="no weights to average"):
        mean_of([])
