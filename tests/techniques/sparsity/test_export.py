"""Dense states out of a sparse model and into one."""

import copy
import pickle

import pytest
import torch
from torch import nn

from shoestring.errors import InputError
from shoestring.step.apply import apply
from shoestring.step.step import Step
from shoestring.techniques import Sparsity
from shoestring.techniques.sparsity import load_dense, sparse_tensors, to_dense

from .small_models import CASES, OPTIMIZERS, build


def begin(seed: int) -> Step:
    model = build("tied", seed)
    settings = Sparsity(0.4, seed=seed, schedule=((99, 2),), threshold=0.1)
    return apply([settings], model, OPTIMIZERS["sgd"](model), loss=CASES["tied"][2])


def test_a_dense_model_takes_the_state() -> None:
    step = begin(0)
    step(CASES["tied"][1](0))
    plain = build("tied", 5)
    plain.load_state_dict(to_dense(step.model))
    ids = CASES["tied"][1](1)
    torch.testing.assert_close(plain(ids), step.model(ids))
    assert to_dense(plain).keys() == plain.state_dict().keys()


def test_another_pattern_is_taken_over() -> None:
    one, two = begin(0), begin(1)
    for number in range(4):
        one(CASES["tied"][1](number))
    two(CASES["tied"][1](0))
    sizes = [t.nonzeros for t in sparse_tensors(two.model).values()]
    # Sizes differ after a rewiring; a tensor is taken over whole only where it fits.
    fits = [int((t.dense(t.values) != 0).sum()) for t in sparse_tensors(one.model).values()]
    load_dense(two.model, to_dense(one.model))
    assert [t.nonzeros for t in sparse_tensors(two.model).values()] == sizes
    pairs = zip(to_dense(one.model).items(), to_dense(two.model).items(), strict=True)
    taken = dict(zip(sparse_tensors(two.model), zip(fits, sizes, strict=True), strict=True))
    for (name, expected), (_, found) in pairs:
        if name not in taken or taken[name][0] <= taken[name][1]:
            assert torch.equal(found, expected), name
    two(CASES["tied"][1](1))


def test_a_dense_state_is_taken_at_the_pattern() -> None:
    step, given = begin(0), build("tied", 7).state_dict()
    masks = {n: t.mask().view(t.shape) for n, t in sparse_tensors(step.model).items()}
    load_dense(step.model, given)
    for name, found in to_dense(step.model).items():
        mask = masks.get("embed.weight" if name == "output.weight" else name)
        expected = given[name] if mask is None else given[name] * mask
        if name == "embed.weight" or name == "output.weight":
            expected = given["embed.weight"] * masks["embed.weight"]
        assert torch.equal(found, expected), name


def test_states_that_do_not_belong() -> None:
    step = begin(0)
    state = to_dense(step.model)
    with pytest.raises(InputError, match=r"no embed\.weight"):
        load_dense(step.model, {k: v for k, v in state.items() if k != "embed.weight"})
    with pytest.raises(InputError, match="shape"):
        load_dense(step.model, {**state, "hidden.weight": torch.zeros(3, 3)})
    with pytest.raises(InputError, match="extra"):
        load_dense(step.model, {**state, "extra": torch.zeros(3)})
    wrong = step.model.state_dict()
    wrong["embed.weight_index"] = torch.zeros_like(wrong["embed.weight_index"])
    with pytest.raises(RuntimeError, match="values and index of another tensor"):
        step.model.load_state_dict(wrong)


def test_the_model_s_own_state_round_trips_after_rewiring() -> None:
    one, two = begin(0), begin(1)
    for number in range(5):
        one(CASES["tied"][1](number))
    two(CASES["tied"][1](0))
    state = copy.deepcopy(one.model.state_dict())
    two.model.load_state_dict(state)
    for name, expected in state.items():
        assert torch.equal(two.model.state_dict()[name], expected)
    assert torch.equal(one.model(torch.tensor([[3]])), two.model(torch.tensor([[3]])))
    two(CASES["tied"][1](1))  # momentum of another size has started again
    embed, output = two.model.embed, two.model.output
    assert isinstance(embed, nn.Module) and isinstance(output, nn.Module)
    assert embed.weight_index is output.weight_index


def test_an_assigned_state_brings_its_pattern() -> None:
    first, second = begin(0), begin(1)
    second.model.load_state_dict(copy.deepcopy(first.model.state_dict()), assign=True)
    ours, theirs = to_dense(second.model), to_dense(first.model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = CASES["tied"][1](1)
    torch.testing.assert_close(second.model(ids), first.model(ids))


def test_a_sparse_recurrent_model_is_pickled() -> None:
    model = nn.LSTM(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = ("weight_ih_l0", "weight_hh_l0")
    apply([Sparsity(0.4, tensors=names)], model, optimizer, loss=lambda m, b: m(b)[0].sum())
    x = torch.randn(3, 4)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x)[0], model(x)[0])
