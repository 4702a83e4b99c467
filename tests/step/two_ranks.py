"""What two gloo processes do together, job after job; each leaves its results in a file."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.errors import ShoestringError, UnprovenWarning
from shoestring.lab.runs.loop import train
from shoestring.lab.runs.settings import ImageSettings, settings_for
from shoestring.lab.runs.trainer import Trainer
from shoestring.lab.tasks import ImageTask, load_task
from shoestring.step.apply import apply
from shoestring.step.shares import Parallel
from shoestring.step.step import Step
from shoestring.techniques import (
    Checkpointing,
    ChunkedLoss,
    GradientRelease,
    Microbatching,
    Offload,
    OptimizerState,
    Precision,
    Sparsity,
    Technique,
)
from shoestring.techniques.microbatching import accumulate
from shoestring.techniques.plan import Plan
from shoestring.techniques.sparsity import sparse_tensors
from techniques.small_models import SMALL

REWIRES = {"schedule": ((100, 2),), "rewire_fraction": 0.05}
CHOSEN: dict[str, list[Technique]] = {
    "plain": [],
    "microbatched": [Microbatching(2)],  # three of them, so ranks run one and two
    "compensated": [Microbatching(1, accumulate="compensated")],
    "checkpointed": [Checkpointing("residual-2*")],
    "per-block": [Checkpointing("per-block", schedule=("cheap", "[keep, cheap]"))],
    "no-bn": [Checkpointing("no-bn")],
    "every": [Checkpointing("every-3")],
    "fp16": [Precision("fp16", growth_interval=2)],
    "dsr": [Sparsity(0.3, **REWIRES)],
    "set": [Sparsity(0.3, method="set", **REWIRES)],
    "8-bit state": [OptimizerState(8, smallest=64)],
    "bf16, 8-bit state": [Precision("bf16"), OptimizerState(8, smallest=64)],
    "on the host": [Offload(smallest=64)],
    "chunked loss": [ChunkedLoss(8), Checkpointing("residual-1")],
    "released": [GradientRelease(fold=False)],
    "released parts": [GradientRelease(fold=False), Microbatching(2)],
    "together": [Checkpointing("residual-1"), Microbatching(2)],
    "all": [
        Sparsity(0.3, **REWIRES),
        Precision("fp16"),
        Checkpointing("residual-1"),
        Microbatching(2),
    ],
}
SAME = [
    ("ddp", "tied", "plain", "sgd"),
    ("ddp", "tied", "microbatched", "sgd"),
    ("ddp", "tied", "compensated", "sgd"),
    ("ddp", "tied", "checkpointed", "sgd"),
    ("ddp", "tied", "dsr", "sgd"),
    ("ddp", "tied", "set", "sgd"),
    ("ddp", "tied", "fp16", "sgd"),
    ("ddp", "residual", "microbatched", "sgd"),
    ("ddp", "lstm", "microbatched", "adam"),
    ("ddp", "mlp", "dsr", "adam"),
    ("fsdp", "tied", "plain", "sgd"),
    ("fsdp", "tied", "microbatched", "sgd"),
    ("fsdp", "tied", "checkpointed", "sgd"),
    ("fsdp", "tied", "per-block", "sgd"),
    ("fsdp", "tied", "no-bn", "sgd"),
    ("fsdp", "tied", "every", "sgd"),
    ("fsdp", "tied", "together", "sgd"),
    ("fsdp", "tied", "fp16", "sgd"),
    ("fsdp", "lstm", "plain", "adam"),
    ("fsdp", "tied", "fp16", "adam"),
    ("fsdp", "tied", "8-bit state", "adam"),
    ("fsdp", "tied", "bf16, 8-bit state", "adam"),
    ("fsdp", "tied", "on the host", "sgd"),
    ("fsdp", "tied", "released", "sgd"),
    ("fsdp", "tied", "released parts", "sgd"),
    ("ddp", "tied", "released", "sgd"),
    ("ddp", "tied", "released parts", "sgd"),
    ("fsdp", "tied", "chunked loss", "sgd"),
]
"""(parallel, model, plan, optimizer) that must train as one process does."""
CROSSED = [
    ("ddp", "dsr", "sgd"),
    ("fsdp", "microbatched", "sgd"),
    ("fsdp", "fp16", "adam"),
    ("fsdp", "8-bit state", "adam"),
]
"""(parallel, plan, optimizer) whose state goes from two ranks to one and back."""
CLIPPED = ["microbatched", "fp16", "released", "released parts"]
RESUMED = ["fp16", "8-bit state", "bf16, 8-bit state", "on the host"]
"""Plans whose state goes from two ranks of `fsdp` to two others."""
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}
STEPS = 6


def make(
    model: str, plan: str, optimizer: str = "sgd", parallel: Any = None, seed: int = 0
) -> Step:
    torch.manual_seed(seed)
    built = SMALL[model].build()
    made = OPTIMIZERS[optimizer](built)
    return apply(CHOSEN[plan], built, made, loss=SMALL[model].loss, parallel=parallel)


def batches(model: str, count: int = STEPS) -> list[Any]:
    torch.manual_seed(7)
    return [SMALL[model].batch() for _ in range(count)]


def trained(step: Step, data: list[Any]) -> dict[str, Any]:
    losses = [float(step(batch)) for batch in data]
    indexes = {n: t.index.clone() for n, t in sparse_tensors(step.model).items()}
    state = copy.deepcopy(step.state_dict())
    return {"losses": losses, "state": state, "indexes": indexes, "moments": moments(step, state)}


def moments(step: Step, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The optimizer's state as it is meant, however it is stored."""
    parameters = [p for group in step.optimizer.param_groups for p in group["params"]]
    found = {}
    for index, held in state.get("optimizer", {"state": {}})["state"].items():
        for key, value in held.items():
            for meaning in step._setup.meanings:
                if isinstance(value, torch.Tensor):
                    value = meaning.state(parameters[index], key, value, held)
            if isinstance(value, torch.Tensor):
                found[f"{index} {key}"] = value.clone()
    return found


def same(parallel: str, model: str, plan: str, optimizer: str) -> dict[str, Any]:
    return trained(make(model, plan, optimizer, parallel), batches(model))


def clipped(parallel: str | None, plan: str) -> dict[str, Any]:
    """Gradients of two batches, clipped to less than their norm."""
    torch.manual_seed(0)
    model = SMALL["tied"].build()
    made = OPTIMIZERS["sgd"](model)
    step = apply(CHOSEN[plan], model, made, loss=SMALL["tied"].loss, parallel=parallel, clip=0.05)
    norms, accumulates = [], not plan.startswith("released")
    for number, batch in enumerate(batches("tied")):
        step(batch, update=bool(number % 2) or not accumulates)
        if number % 2:
            norms.append(float(step.grad_norm))
    state = copy.deepcopy(step.state_dict())
    return {"losses": norms, "state": state, "moments": moments(step, state)}


def channels_last(parallel: str | None) -> dict[str, Any]:
    """Weights that do not lie in rows, as on a GPU; BatchNorm sees the same microbatches."""
    torch.manual_seed(0)
    model = SMALL["residual"].build().to(memory_format=torch.channels_last)
    optimizer, loss = OPTIMIZERS["sgd"](model), SMALL["residual"].loss
    step = apply([Microbatching(3)], model, optimizer, loss=loss, parallel=parallel)
    return trained(step, batches("residual", 3))


def small_gradients(parallel: str) -> dict[str, Any]:
    """Added one by one, and together as on a GPU; BatchNorm's are not split."""
    found = {}
    plain = accumulate.DEVICES
    try:
        for way, devices in (("one by one", ()), ("together", ("cpu",))):
            accumulate.DEVICES = devices
            torch.manual_seed(0)
            model, loss = SMALL["residual"].build(), SMALL["residual"].loss
            plan = [Precision("fp16"), Microbatching(1)]
            step = apply(plan, model, OPTIMIZERS["sgd"](model), loss=loss, parallel=parallel)
            found[way] = trained(step, batches("residual", 3))
    finally:
        accumulate.DEVICES = plain
    return found


def other_weights_at_first() -> dict[str, Any]:
    """The ranks build different models; rank 0's is trained."""
    return trained(make("mlp", "plain", parallel="ddp", seed=dist.get_rank()), batches("mlp"))


def parts_of_their_own() -> dict[str, Any]:
    """Each rank is given two or four of six examples."""
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 6)
    step = make("mlp", "microbatched", parallel=Parallel("ddp", batches="shares"))
    return trained(step, [(x[mine], y[mine]) for x, y in batches("mlp")])


def parts_of_their_own_sharded() -> dict[str, Any]:
    mine = slice(0, 2) if dist.get_rank() == 0 else slice(2, 6)
    step = make("mlp", "microbatched", parallel=Parallel("fsdp", batches="shares"))
    return trained(step, [(x[mine], y[mine]) for x, y in batches("mlp")])


def units(part: Any) -> torch.Tensor:
    return (part[1] != -100).sum()


def with_padding(count: int = STEPS) -> list[Any]:
    """Labels that do not count, more of them in the last examples."""
    made = batches("mlp", count)
    for _, labels in made:
        labels[3:5] = -100
    return made


def averaged_over_tokens() -> dict[str, Any]:
    return trained(make("mlp", "plain", parallel=Parallel("ddp", weight=units)), with_padding())


class Collectives(TorchDispatchMode):
    """Counts what goes over the network, by name, and the elements that were summed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.summed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.__name__.partition(".")[0]
            self.counts[name] += 1
            if name == "allreduce_":
                self.summed += sum(tensor.numel() for tensor in args[0])
        return func(*args, **(kwargs or {}))


def collectives(parallel: str, plan: str) -> dict[str, Any]:
    """Of the second step."""
    step = make("tied", plan, parallel=parallel)
    first, second = batches("tied", 2)
    step(first)
    with Collectives() as seen:
        step(second)
    elements = sum(p.numel() for p in step.model.parameters())
    return {"counts": dict(seen.counts), "summed": seen.summed, "elements": elements}


def overflow(parallel: str) -> dict[str, Any]:
    """In the second step rank 1's examples overflow, in the gradients of rank 1's rows."""
    model = nn.Sequential(nn.Linear(12, 4))
    optimizer = OPTIMIZERS["sgd"](model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])[:, 2:].mean()

    step = apply(CHOSEN["fp16"], model, optimizer, loss=loss, parallel=parallel)
    data = batches("mlp", 3)
    data[1][0][3:] *= 1000
    step(data[0])
    before = copy.deepcopy(step.state_dict())
    step(data[1])
    after = copy.deepcopy(step.state_dict())
    step(data[2])
    scale: Any = step._setup.state["precision"]
    return {
        "before": before,
        "after": after,
        "last": copy.deepcopy(step.state_dict()),
        "skipped": int(scale.scale.skipped_steps),
        "scale": float(scale.scale.scale),
    }


def statistics() -> dict[str, Any]:
    step = make("residual", "plain", parallel="ddp")
    step(batches("residual", 1)[0])
    norm = step.model.get_submodule("1.0.norm1")
    own = norm.running_mean.clone()
    saved = step.state_dict()["model"]["1.0.norm1.running_mean"]
    return {"own": own, "mean": saved.clone()}


def other_pattern() -> dict[str, Any]:
    """Rank 1 has other values, so it rewires differently: all ranks must say so."""
    step = make("mlp", "dsr", parallel="ddp")
    first, second = batches("mlp", 2)
    step(first)
    if dist.get_rank() == 1:
        with torch.no_grad():
            for tensor in sparse_tensors(step.model).values():
                tensor.values.copy_(tensor.values.flip(0))
    return {"error": _error(lambda: step(second))}


def refusals() -> dict[str, Any]:
    frozen = {}
    for plan in ("dsr", "compensated"):
        frozen[plan] = _error(lambda plan=plan: make("tied", plan, parallel="fsdp"))
    step = make("mlp", "plain", parallel="ddp")
    images, labels = batches("mlp", 1)[0]
    frozen["small"] = _error(lambda: step((images[:1], labels[:1])))
    wrapped = DistributedDataParallel(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    frozen["wrapped"] = _error(
        lambda: apply([], wrapped, optimizer, loss=lambda m, b: m(b).sum(), parallel="ddp")
    )
    return frozen


def wrapped_by_hand() -> dict[str, Any]:
    """A transformed model in PyTorch's own DDP and a plain loop, as users write it."""
    chosen = [Sparsity(0.3, method="static"), Checkpointing("residual-2")]
    small = SMALL["tied"]
    torch.manual_seed(0)
    model = small.build()
    optimizer = OPTIMIZERS["sgd"](model)
    apply(chosen, model, optimizer, loss=small.loss)
    outer = DistributedDataParallel(model)
    mine = slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3)
    losses = []
    for tokens, labels in batches("tied"):
        optimizer.zero_grad()
        loss = small.loss(outer, (tokens[mine], labels[mine]))
        loss.backward()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(float(total) / 2)
    return {"losses": losses, "state": {"model": model.state_dict()}}


def go_on(parallel: str, plan: str, optimizer: str, state: dict[str, Any]) -> dict[str, Any]:
    step = make("tied", plan, optimizer, parallel=parallel, seed=1)
    step.load_state_dict(state)
    return trained(step, batches("tied")[STEPS // 2 :])


def begin(parallel: str, plan: str, optimizer: str) -> dict[str, Any]:
    step = make("tied", plan, optimizer, parallel=parallel)
    return trained(step, batches("tied")[: STEPS // 2])


def resumed(plan: str) -> dict[str, Any]:
    """All updates of one step, and those of two, the second of which loads the first's state."""
    whole = trained(make("tied", plan, "adam", "fsdp"), batches("tied"))
    begun: list[Any] = [begin("fsdp", plan, "adam")["state"]]
    dist.broadcast_object_list(begun, 0)
    return {"whole": whole, "parts": go_on("fsdp", plan, "adam", begun[0])}


def settings(**others: Any) -> tuple[ImageSettings, ImageTask]:
    """A small run on digits whose updates are too few for rounding to grow."""
    task = load_task("digits", folder=None, split="test", seed=0)
    given = {"epochs": 1, "batch": 24, "seed": 1, "learning_rate": 0.02, **others}
    plan = Plan(microbatching=Microbatching(6))
    return settings_for("wrn-10-0.5", "digits", images=len(task.images), plan=plan, **given), task


def run_to(folder: Path, stop_after: int, **others: Any) -> Any:
    made, task = settings()
    return train(
        made, task, folder, device=torch.device("cpu"), snapshot_every=2, stop_after=stop_after,
        **others,
    )  # fmt: skip


def told_to_stop(place: Path) -> dict[str, Any]:
    """Rank 1 alone gets a signal after its second update."""
    plain = Trainer.advance

    def advance(trainer: Trainer) -> None:
        plain(trainer)
        if trainer.done == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer.advance = advance  # type: ignore[method-assign]
    try:
        return {"error": _error(lambda: run_to(place / "parts", 4))}
    finally:
        Trainer.advance = plain  # type: ignore[method-assign]


def resumed_to_the_bit(place: Path) -> dict[str, Any]:
    """What was stopped, gone on with, beside four updates at once."""
    run_to(place / "parts", 4, resume=True)
    run_to(place / "whole", 4)
    return {}


def folder_in_use(place: Path) -> dict[str, Any]:
    """Rank 0 finds that the folder holds a run; rank 1 looks at none."""
    return {"error": _error(lambda: run_to(place / "parts", 9))}


class Routed(nn.Module):
    """Layers that only some examples go through, and that are not used in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(12, 4)
        self.some, self.all, self.others = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.all(x))
        chosen = x[:, 0] > 0
        for layer, rows in ((self.some, chosen), (self.others, ~chosen)):
            if rows.any():
                x = x + layer(x) * rows[:, None]
        return self.last(x)


def routed() -> dict[str, Any]:
    """Each rank has gradients that the other has not, of other layers in every step."""
    made = {}
    for plan in ("plain", "released"):
        torch.manual_seed(0)
        model = Routed()
        loss = SMALL["mlp"].loss
        step = apply(CHOSEN[plan], model, OPTIMIZERS["adam"](model), loss=loss, parallel="ddp")
        data = []
        for number, (x, y) in enumerate(batches("mlp")):
            sign = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])[:, None]
            data.append((x.abs() * sign * (-1) ** number, y))
        with torch.no_grad():
            model.all.weight.copy_(torch.eye(12))
            model.all.bias.zero_()
        made[plan] = trained(step, data)
    return made


def streams() -> dict[str, Any]:
    made, task = settings()
    trainer = Trainer(made, task, torch.device("cpu"), predict=False)
    return {"drawn": torch.rand(3), "share": trainer.feed.share}


def broken_on_one_rank(place: Path) -> dict[str, Any]:
    """A weight of rank 1 is no number before a snapshot: nobody may write one."""
    plain = Trainer.advance

    def advance(trainer: Trainer) -> None:
        plain(trainer)
        if dist.get_rank() == 1 and trainer.done == 2:
            with torch.no_grad():
                next(iter(trainer.step.model.parameters())).fill_(torch.nan)

    Trainer.advance = advance  # type: ignore[method-assign]
    try:
        return {"error": _error(lambda: run_to(place / "broken", 2))}
    finally:
        Trainer.advance = plain  # type: ignore[method-assign]


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except ShoestringError as error:
        return f"{type(error).__name__}: {error.message}"
    return "none"


def jobs(place: Path, states: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, in the order both ranks run them."""
    made: dict[str, Callable[[], dict[str, Any]]] = {}
    for case in SAME:
        made[" ".join(case)] = lambda case=case: same(*case)
    for case in CROSSED:
        made[f"begin {' '.join(case)}"] = lambda case=case: begin(*case)
        made[f"go on {' '.join(case)}"] = lambda case=case: go_on(*case, states[case[1]])
    for plan in RESUMED:
        made[f"resumed {plan}"] = lambda plan=plan: resumed(plan)
    for parallel in ("ddp", "fsdp"):
        for plan in CLIPPED:
            made[f"clipped {parallel} {plan}"] = lambda a=parallel, b=plan: clipped(a, b)
        made[f"channels last {parallel}"] = lambda a=parallel: channels_last(a)
        made[f"small gradients {parallel}"] = lambda a=parallel: small_gradients(a)
        made[f"overflow {parallel}"] = lambda a=parallel: overflow(a)
        for plan in ("plain", "microbatched"):
            made[f"collectives {parallel} {plan}"] = lambda a=parallel, b=plan: collectives(a, b)
    for run_job in (told_to_stop, folder_in_use, resumed_to_the_bit, broken_on_one_rank):
        made[run_job.__name__] = lambda job=run_job: job(place)
    for job in (
        other_weights_at_first, parts_of_their_own, parts_of_their_own_sharded,
        averaged_over_tokens, statistics, wrapped_by_hand, refusals, other_pattern,
        streams, routed,
    ):  # fmt: skip
        made[job.__name__] = job
    return made


def run(rank: int, folder: str) -> None:
    """One rank: all jobs, then the results to a file."""
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", UnprovenWarning)  # a sharded model cannot be copied for a test
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place / 'meet'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    states = torch.load(place / "states.pt", weights_only=False)
    results = {name: job() for name, job in jobs(place, states).items()}
    torch.save(results, place / f"rank{rank}.pt")
    dist.destroy_process_group()


def together(folder: Path, states: dict[str, Any]) -> None:
    """Run both ranks, which leave results and runs in the folder."""
    torch.save(states, folder / "states.pt")
    mp.spawn(run, args=(str(folder),), nprocs=2)


def results(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 and rank 1 found."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
