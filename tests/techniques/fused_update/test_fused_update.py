"""The fused update: the same numbers, no copies, and an optimizer that is left as it was asked."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.planning.planner import Planner
from shoestring.step.predict import predict_step
from shoestring.techniques.claims import Circumstances, Level
from shoestring.techniques.fused_update import drop_unused, make_state
from shoestring.verification.claims import claims

BATCH = torch.randn(12, 8), torch.arange(12) % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.body(x)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def trained(techniques, make, steps=3):
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    step = ss.apply(techniques, model, optimizer, loss=loss)
    for _ in range(steps):
        step(BATCH)
    return model, optimizer, step


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_trains_as_the_plain_update_does(name):
    plain, held, _ = trained([], OPTIMIZERS[name])
    fused, other, _ = trained([ss.FusedUpdate()], OPTIMIZERS[name])
    assert all(group["fused"] for group in other.param_groups)
    for a, b in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert {len(s) for s in held.state.values()} == {len(s) for s in other.state.values()}
    assert len(held.state) == len(other.state), "no state for what has no gradient"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_certified_and_nothing_changes(name):
    model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    certificate = ss.verify([ss.FusedUpdate()], model, [BATCH], loss=loss, optimizer=optimizer)
    assert certificate.ok, str(certificate)
    assert optimizer.state_dict() == before


def test_the_loss_after_an_update_that_rounds_elsewhere_is_not_claimed_equal():
    """Now and then it is equal by chance, and now and then it is not."""
    made = claims(ss.Plan([ss.FusedUpdate()]), Circumstances("cpu"))
    assert made["gradients"][0] is Level.EQUAL
    assert made["loss"][0] is made["buffers"][0] is made["parameters"][0] is Level.ROUNDING


def test_its_update_makes_no_copies():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(1, 256)

    def peak(techniques):
        return predict_step(
            techniques, model, batch, loss=lambda m, b: m(b).sum(), optimizer=optimizer,
            device="cuda",
        ).peak_bytes  # fmt: skip

    parameters = sum(p.nbytes for p in model.parameters())
    assert peak([]) - peak([ss.FusedUpdate()]) > 0.9 * parameters


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda p: torch.optim.AdamW(p, foreach=True), "foreach"),
        (lambda p: torch.optim.Adagrad(p), "Adagrad"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
    ],
)
def test_what_it_cannot_do_is_named(make, word):
    model = Net()
    optimizer = make(model.parameters())
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(ss.InputError, match=word):
        ss.apply([ss.FusedUpdate()], model, optimizer, loss=loss)
    assert optimizer.state_dict()["param_groups"] == before


def test_a_kernel_that_leaves_weights_as_they_are_is_refused():
    """As that of PyTorch 2.13 for SGD of 16-bit weights on the CPU; beside Precision none runs."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        batch = BATCH[0].to(dtype), BATCH[1]
        moved = []
        for techniques in ([], [ss.FusedUpdate()]):
            torch.manual_seed(0)
            model = Net().to(dtype)
            own = torch.optim.SGD(model.parameters(), lr=1.0)
            try:
                step = ss.apply(techniques, model, own, loss=loss)
            except ss.InputError as error:
                assert "leaves weights in" in str(error) and not own.param_groups[0]["fused"]
                assert dtype is not torch.float32
                break
            step(batch)
            moved.append([p.detach().float() for p in model.parameters()])
        else:
            torch.testing.assert_close(*moved, rtol=0.02, atol=0.02)
    model = Net().bfloat16()
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    ss.apply([ss.FusedUpdate(), ss.Precision("bf16")], model, own, loss=loss)


class Branches(nn.Module):
    """The second layer has no gradient unless it is asked for, as an expert or an early exit."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, deep):
        return self.two(self.one(x)) if deep else self.one(x)


@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_a_first_gradient_may_come_late(dampening):
    found, hooks = [], []
    for techniques in ([], [ss.FusedUpdate()]):
        torch.manual_seed(0)
        model = Branches()
        own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening)
        own.register_step_pre_hook(lambda optimizer, *_: hooks.append(len(optimizer.param_groups)))
        step = ss.apply(techniques, model, own, loss=lambda m, deep: m(BATCH[0], deep).var())
        for deep in (False, True, False, True):
            step(deep)
        found.append(
            [*model.parameters(), *(own.state[p]["momentum_buffer"] for p in model.parameters())]
        )
    torch.testing.assert_close(*found)
    assert hooks == [1] * 8


def test_a_later_failure_gives_the_optimizer_back():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ss.InputError):
        ss.apply(
            [ss.FusedUpdate(), ss.Checkpointing("residual-1", blocks=("nowhere",))],
            model, optimizer, loss=loss,
        )  # fmt: skip
    assert optimizer.state_dict() == before


def test_plain_state_can_be_loaded_and_goes_on_fused():
    model, optimizer, _ = trained([], OPTIMIZERS["adamw"])
    other = copy.deepcopy(model)
    taken = OPTIMIZERS["adamw"](other.parameters())
    step = ss.apply([ss.FusedUpdate()], other, taken, loss=loss)
    taken.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(BATCH)
    plain = ss.apply([], model, optimizer, loss=loss)
    plain(BATCH)
    assert all(group["fused"] for group in taken.param_groups)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_state_is_made_early_on_cuda_alone():
    model = Net()
    assert make_state(torch.optim.AdamW(model.parameters())) == []


def test_state_that_no_update_moved_is_taken_away():
    model, optimizer, _ = trained([], OPTIMIZERS["adamw"])
    used = len(optimizer.state)
    for parameter in model.unused.parameters():
        optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": torch.zeros(3)}
    drop_unused(optimizer, list(model.parameters()))
    assert len(optimizer.state) == used


def planner(**given):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    optimizer = given.pop("optimizer", torch.optim.AdamW(model.parameters()))
    return Planner(
        model, torch.randn(64, 64), loss=lambda m, b: m(b).square().mean(), optimizer=optimizer,
        **given,
    )  # fmt: skip


def test_a_plan_takes_it_on_cuda_wherever_it_may():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "fused update" in planner(device="cuda").plan(2**31).short()
        assert "fused" not in planner(device="cuda", allow="exact").plan(2**31).short()
        assert "fused" not in planner(device="cpu").plan(2**31).short()
        assert "fused" not in planner(device="cuda", accounting="fundamental").plan(2**31).short()


def test_beside_another_update_of_its_own_it_is_left_out():
    made = planner(device="cuda", allow="near")
    for setting in made._settings(made.allowed):
        names = [t.name for t in setting.techniques]
        others = [t for t in setting.techniques if t.updates_on_device and t.name != "fused_update"]
        assert bool(others) != ("fused_update" in names)
