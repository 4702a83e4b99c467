"""Saved activations on the host: in files beside the CPU, streamed beside a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.step.predict import predict_step
from shoestring.techniques import activation_offload as technique
from shoestring.techniques import host
from shoestring.techniques.activation_offload import moving
from shoestring.techniques.activation_offload.saving import Host, SavingOnHost
from shoestring.techniques.saving import keeps_inputs

BLOCKS, WIDTH = 6, 24


@pytest.fixture(params=["mapped", "streamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As beside the CPU; and as beside a GPU, copies made at once."""
    if request.param == "streamed":
        monkeypatch.setattr(moving, "on_cuda", lambda tensor: True)
    return str(request.param)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 10))


def data(rows: int = 512) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), x[:, :10].argmax(1))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def moved(what: str = "inputs") -> ss.Technique:
    return ss.ActivationOffload(what, smallest=1)


def trained(*plan: ss.Technique) -> tuple[ss.Step, list[torch.Tensor]]:
    model = network()
    step = ss.apply(plan, model, sgd(model), loss=loss)
    torch.manual_seed(3)
    losses = [step(data()).clone() for _ in range(3)]
    return step, [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


BESIDE: dict[str, tuple[ss.Technique, ...]] = {
    "alone": (),
    "blocks": (ss.Checkpointing("residual-1"),),
    "pairs of blocks": (ss.Checkpointing("residual-2*"),),
    "nested": (
        ss.Checkpointing("per-block", schedule=("keep", "[cheap, [keep], lean]", "[keep]", "lean")),
    ),
    "every-2": (ss.Checkpointing("every-2"),),
    "parts": (ss.Checkpointing("residual-1"), ss.Microbatching(128)),
    "bf16": (ss.Checkpointing("residual-1"), ss.Precision("bf16")),
    "bits": (ss.Checkpointing("residual-1"), ss.ActivationBits(4, smallest=1)),
    "chunked": (ss.Checkpointing("residual-1"), ss.ChunkedLoss(128)),
    "released": (ss.Checkpointing("residual-1"), ss.GradientRelease()),
    "sparse": (ss.Checkpointing("residual-1"), ss.Sparsity(0.5)),
    "state": (ss.Checkpointing("residual-1"), ss.Offload(smallest=1)),
}


QUICK = [("blocks", "inputs"), ("alone", "all"), ("bits", "inputs")]
CASES = [
    pytest.param(beside, what, marks=[pytest.mark.slow] * ((beside, what) not in QUICK))
    for beside in BESIDE
    for what in ("inputs", "all")
]


@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
@pytest.mark.parametrize(("beside", "what"), CASES)
def test_no_bit_differs_and_the_predicted_peak_is_measured(
    beside: str, what: str, way: str
) -> None:
    plan = [*BESIDE[beside], moved(what)]
    model = network()
    predicted = predict_step(plan, model, data(), loss=loss, optimizer=sgd(model)).peak_bytes
    (_, plain), (step, found) = trained(*BESIDE[beside]), trained(*plan)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert step.measure(data()).peak_bytes == pytest.approx(predicted, rel=0.001)


@pytest.mark.parametrize("two_ways", [False, True])
def test_parts_of_a_storage_that_count_their_own_writes(two_ways: bool, way: str) -> None:
    """A GRU on the CPU writes its gates one after the other into one storage."""

    def gradients(*plan: ss.Technique) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.GRU(8, 16, batch_first=True, bidirectional=two_ways)
        own = torch.optim.SGD(model.parameters(), lr=1.0)
        step = ss.apply(plan, model, own, loss=lambda model, x: model(x)[0].square().mean())
        step(torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1)))
        return [p.detach() for p in model.parameters()]

    found = zip(gradients(moved("all")), gradients(), strict=True)
    assert all(torch.equal(a, b) for a, b in found)


def test_what_is_recomputed_keeps_as_many_inputs_as_are_under_way(way: str) -> None:
    """Beside a GPU two of six, beside the CPU none when backward reads the last."""
    rows = 8192
    each = rows * WIDTH * 4
    model = network()
    plan = [ss.Checkpointing("residual-1")]
    plain, there = (
        predict_step([*plan, *more], model, data(rows), loss=loss, optimizer=sgd(model)).peak_bytes
        for more in ((), (moved(),))
    )
    here = 2 if way == "streamed" else 0
    gradients = sum(p.nbytes for p in model.parameters())  # there are more when the peak comes
    assert plain - there == pytest.approx((BLOCKS - here) * each, abs=gradients)


def test_all_that_is_saved_goes(way: str) -> None:
    plain, there = (trained(*m)[0].measure(data()).peak_bytes for m in ((), (moved("all"),)))
    assert there < 0.45 * plain


def test_autocast(way: str) -> None:
    """Weights in 16 bits are saved, too, and lie on the host for a while."""

    def cast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, x)

    found = []
    for plan in ([], [moved("all")], [ss.Checkpointing("residual-1"), moved()]):
        model = network().eval()
        step = ss.apply(plan, model, sgd(model), loss=cast)
        for _ in range(2):
            step(data())
        found.append([p.detach() for p in model.parameters()])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_it_is_certified_as_equal(way: str) -> None:
    model = network()
    plan = [ss.Checkpointing("residual-1"), moved()]
    found = ss.verify(plan, model, [data(64)], loss=loss, optimizer=sgd(model))
    assert found.ok, found
    compared = ("loss", "gradients", "optimizer state", "parameters", "random stream")
    assert {found[what].found for what in compared} == {ss.Level.EQUAL}


# -- what is moved -----------------------------------------------------------------------------


def saving(model: nn.Module, batch: Any = (), **given: Any) -> tuple[SavingOnHost, Host]:
    there = Host(host.folder_for(None), 1)
    return SavingOnHost(model, batch, there, **{"everything": True, "smallest": 1, **given}), there


def test_a_storage_is_moved_once_and_what_is_there_anyway_stays(way: str) -> None:
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)
    holder = nn.Module()
    holder.weight = weight
    saved, there = saving(holder, x)
    with saved:
        a = x @ weight  # the batch and a parameter: nothing moves
        assert saved.seen == 0
        b = torch.stack([a.exp(), a.t().sin()])  # exp saves its output, sin a view of a
        assert saved.seen == 2
        c = (b * b[0]).sum() + (b[1].tanh() * b).sum()  # windows on one storage
        assert saved.seen == 4  # and what tanh gave
    held = there.link.held_bytes
    assert held == 4 * 64 * 4 + b.nbytes - 64 * 4
    c.backward()
    expected = _gradient(x, weight)
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]
    del a, b, c
    gc.collect()
    assert there.link.held_bytes == 0


def _gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    own = weight.detach().clone().requires_grad_()
    a = x @ own
    b = torch.stack([a.exp(), a.t().sin()])
    ((b * b[0]).sum() + (b[1].tanh() * b).sum()).backward()
    assert own.grad is not None
    return own.grad


def test_small_ones_and_small_windows_stay(way: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved, _ = saving(nn.Module(), smallest=64)
    with saved:
        wide = x * 2
        (wide[0] * wide[0].detach()).sum()  # 64 of 4096
        x[0, :8].exp()
        assert saved.seen == 0
        wide.exp()
        assert saved.seen == 1


def test_what_is_kept_on_the_device_anyway_is_not_moved(way: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved, _ = saving(nn.Module(), everything=False)
    with saved:
        y = x * 2
        y.sin()  # keeps y
        with keeps_inputs(of_block=True):
            y.cos()
        assert saved.seen == 0
        z = x * 3
        with keeps_inputs(of_block=True):
            z.cos()
        assert saved.seen == 1


def test_a_graph_can_be_read_twice(way: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved, _ = saving(nn.Module())
    with saved:
        out = (x * 2).exp().sin().sum()
    out.backward(retain_graph=True)
    first, x.grad = x.grad, None
    out.backward()
    assert torch.equal(first, x.grad)  # type: ignore[arg-type]


def test_what_leaves_is_bounded_and_the_next_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "on_cuda", lambda tensor: True)
    link = moving.HostLink(host.folder_for(None), 1)
    link.begin()
    given = [torch.full((1000,), float(i)) for i in range(5)]
    ends = [weakref.ref(t.untyped_storage()) for t in given]
    made = []
    while given:
        made.append(link.move(given.pop(0).detach()))
        assert sum(end() is not None for end in ends) - len(given) == 1
    assert [m._here is not None for m in made] == [False, False, False, False, True]
    assert made[4].flat()[0] == 4 and made[3]._here is not None and made[2]._here is None
    made.pop()
    assert made[3].flat()[0] == 3 and made[2]._here is not None and made[1]._here is None
    made.clear()
    assert link.held_bytes == 0


def test_one_changed_in_place_while_it_leaves_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch says it of a tensor that it saved."""
    monkeypatch.setattr(moving, "on_cuda", lambda tensor: True)
    x = torch.randn(64, requires_grad=True)
    saved, _ = saving(nn.Module())
    with saved:
        y = x * 2
        out = y.sin().sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after it was saved for backward"):
        out.backward()


# -- no room -----------------------------------------------------------------------------------


FULL = """
import resource, sys, warnings, torch, shoestring as ss
sys.path.insert(0, {tests!r})
from techniques.activation_offload.test_activation_offload import data, loss, network, sgd
def run(*plan):
    model = network()
    step = ss.apply([ss.Checkpointing("residual-1"), *plan], model, sgd(model), loss=loss)
    torch.manual_seed(3)
    for _ in range(2):
        step(data())
    return [p.detach() for p in model.parameters()]
plain = run()
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    found = run(ss.ActivationOffload(smallest=1))
print(len(said), all(map(torch.equal, plain, found)), said[0].message)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
def test_a_disk_that_fills_loses_nothing(tmp_path: Path) -> None:
    """A file may have 40 kB, as if the disk had no more: what is saved stays in memory."""
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", FULL.format(tests=tests, limit=40_000)],
        capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout.startswith("1 True activation_offload: a saved tensor of 49.2 KB"), done
    assert done.stdout.count("\n") == 1 and "stay on the device: " in done.stdout


def test_a_pinned_allocation_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third, and what follows in this step and the next, stays where it is; said once."""
    plan, tried = [ss.Checkpointing("residual-1"), moved()], []

    def place(flat: torch.Tensor, folder: str, *, pinned: bool) -> torch.Tensor:
        tried.append(flat.nbytes)
        if len(tried) == 3:
            raise OSError("no pinned memory: CUDA error: out of memory")
        return host.place_for(flat, folder, pinned=False)

    _, plain = trained(plan[0])
    monkeypatch.setattr(moving, "place_for", place)
    with pytest.warns(RuntimeWarning, match="stay on the device: no pinned memory") as said:
        _, found = trained(*plan)
    assert len(said) == 1 and len(tried) == 3
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    with pytest.raises(InputError, match="cannot write into the folder"):
        ss.apply([ss.ActivationOffload(folder="/nowhere")], model, sgd(model), loss=loss)
    monkeypatch.setattr(host, "in_memory", lambda folder: True)
    with pytest.raises(InputError, match="lies in memory: nothing would be saved"):
        ss.apply([moved()], model, sgd(model), loss=loss)


@pytest.mark.parametrize(
    ("given", "said"),
    [({"what": "state"}, "cannot offload 'state'"), ({"smallest": 0}, "not a whole number")],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ss.ActivationOffload(**given)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([moved()], "no tensor of 1 elements is kept to recompute a block"),
        ([ss.ActivationOffload("all", smallest=10**9)], "no tensor of 1000000000 .* is saved"),
    ],
)
def test_what_moves_nothing_warns(plan: list[ss.Technique], said: str) -> None:
    model = network()
    step = ss.apply(plan, model, sgd(model), loss=loss)
    with pytest.warns(NoEffectWarning, match=said):
        step(data(8))
    step(data(8))


# -- the report's accounting, and plans --------------------------------------------------------


def test_the_fundamental_accounting_by_hand() -> None:
    """Two inputs are there at once instead of five: the first block is recomputed with the head."""
    given: dict[str, Any] = {"loss": loss, "optimizer": "sgd"}
    each = 512 * WIDTH * 4
    plan = [ss.Checkpointing("residual-1")]
    plain = ss.profile(network(), data(), techniques=plan, **given)
    there = ss.profile(network(), data(), techniques=[*plan, moved()], **given)
    assert plain.peak_bytes - there.peak_bytes == (BLOCKS - 1 - 2) * each
    alone = ss.profile(network(), data(), techniques=[moved()], **given)
    assert alone.peak_bytes == ss.profile(network(), data(), **given).peak_bytes


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*(Block() for _ in range(16))))


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean(0).sum()


@pytest.mark.slow
def test_a_plan_moves_inputs_where_that_is_the_fastest_that_fits() -> None:
    """And with more room not; the plan says how much is hidden."""
    x = torch.randn(1, 40_000, WIDTH)
    given: dict[str, Any] = {"loss": squared, "optimizer": "sgd", "allow": "exact"}
    plan = ss.plan(deep(), x, budget="180 MB", device="cuda", **given)
    assert "activation_offload" in [t.name for t in plan.techniques], plan
    found = plan.predicted
    assert found.link_bytes and found.link_seconds == pytest.approx(2 * found.link_bytes / 5e10)
    assert 0 < found.hidden_seconds <= found.link_seconds and not found.captured
    assert "copied from the host and back" in str(plan)
    without = ss.plan(deep(), x, budget="230 MB", device="cuda", **given)
    assert "activation_offload" not in [t.name for t in without.techniques], without


@pytest.mark.slow
def test_a_plan_for_the_cpu_moves_inputs_last_and_holds() -> None:
    model, x = deep(), torch.randn(1, 4000, WIDTH)
    given: dict[str, Any] = {"loss": squared, "optimizer": "sgd", "allow": "exact"}
    roomy = ss.plan(model, x, budget="12 MB", **given)
    assert "activation_offload" not in [t.name for t in roomy.techniques], roomy
    plan = ss.plan(model, x, budget="7.2 MB", **given)
    assert "activation_offload" in [t.name for t in plan.techniques], plan
    step = ss.apply(plan, model, sgd(model), loss=squared)
    step(x)
    assert step.measure(x).peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.01)


def test_its_readme_runs() -> None:
    text = Path(technique.__file__).with_name("README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "README.md", "exec"), {})


# -- on a GPU ----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("what", ["inputs", "all"])
def test_on_a_gpu_no_bit_differs_and_memory_is_as_predicted(what: str) -> None:
    """Large enough that copies are still under way when the next operation runs."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = (
                nn.LayerNorm(1024),
                nn.Linear(1024, 4096),
                nn.Linear(4096, 1024),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def run(*plan: ss.Technique) -> tuple[list[torch.Tensor], int, int, ss.Step]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Wide() for _ in range(12))).cuda()
        x = torch.randn(
            16384, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
        )
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = [*([ss.Checkpointing("residual-1")] if what == "inputs" else []), *plan]
        predicted = predict_step(chosen, model, x, loss=squared, optimizer=own).peak_bytes
        step = ss.apply(chosen, model, own, loss=squared)
        step.use_graph(False)
        for _ in range(4):
            step(x)
        return [p.detach() for p in model.parameters()], step.measure(x).peak_bytes, predicted, step

    plain, resident_bytes, _, _ = run()
    found, peak_bytes, predicted, step = run(ss.ActivationOffload(what))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert peak_bytes < resident_bytes - 8 * 16384 * 1024 * 4
    assert peak_bytes == pytest.approx(predicted, rel=0.02)
    assert step.why_not_captured == "saved activations are copied to the host and back"


def test_a_weight_that_was_put_there_while_the_model_runs_stays() -> None:
    """As ranks do that split a model: its parameters are others than those before."""
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)
    context, _ = saving(layer, x)
    with context as saved:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        x @ layer.weight.t()
    assert saved.seen == 0
