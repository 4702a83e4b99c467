"""The mean of several states."""

import pytest
import torch
from torch import nn

from shoestring import OptimizerState, Plan, Precision, Sparsity, apply
from shoestring.errors import InputError
from shoestring.lab.runs import snapshot
from shoestring.lab.runs.average import averaged_model, mean_of
from shoestring.techniques.sparsity import to_dense


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


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    return model, lambda model, batch: model(batch).square().mean()


@pytest.mark.parametrize("others", [(), (Precision("fp16"),)], ids=["fp32", "fp16"])
def test_sparse_weights_are_averaged_across_rewirings(tmp_path, others):
    """As the report does: the mean of ten has nonzeros wherever one of them has, and is dense."""
    plan = Plan.of([Sparsity(0.3, schedule=((100, 1),), fraction_multiplier=20), *others])
    model, loss = build()
    step = apply(plan, model, torch.optim.Adam(model.parameters(), lr=0.05), loss=loss)
    paths, dense = [], []
    for number in range(1, 11):
        step(torch.randn(4, 6))
        state = {"model": step.state_dict()["model"]}
        paths.append(snapshot.save(tmp_path, number, state, kind="weights", keep=10))
        dense.append({n: v.clone() for n, v in to_dense(step.model).items()})
    assert step.counts["rewirings"] == 10 and step.counts["rewired_weights"] > 0
    made, count = averaged_model(build, plan, reversed(paths), torch.device("cpu"))
    assert count == 10
    found = made.state_dict()
    for name, newest in dense[-1].items():
        mean = torch.stack([state[name].double() for state in dense]).mean(0).to(newest.dtype)
        assert found[name].equal(mean), name
    weight = "2.weight"
    assert (found[weight] != 0).sum() > (dense[-1][weight] != 0).sum()


def test_techniques_of_the_update_change_nothing_in_a_mean(tmp_path):
    """They are applied to an optimizer that the techniques of a text know."""
    plan = Plan.of([OptimizerState(8, smallest=8)])
    states = [build()[0].state_dict() for _ in range(2)]
    states[1]["0.bias"] = states[1]["0.bias"] + 1
    paths = [
        snapshot.save(tmp_path, number, {"model": state}, kind="weights", keep=10)
        for number, state in enumerate(states)
    ]
    made, count = averaged_model(build, plan, paths, torch.device("cpu"))
    assert count == 2
    assert torch.allclose(made.state_dict()["0.bias"], states[0]["0.bias"] + 0.5)


def test_weights_of_different_models_have_no_mean():
    with pytest.raises(InputError, match="different models"):
        mean_of([{"a": torch.ones(2)}, {"b": torch.ones(2)}])


def test_nothing_to_average():
    with pytest.raises(InputError, match="no weights to average"):
        mean_of([])
