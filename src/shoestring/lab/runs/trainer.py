"""Trainer: a run's state (model, optimizer, data, counters) and what one update does to it."""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...errors import InputError, ShoestringError, first_line
from ...step.profiling import profile
from ..tasks import ImageTask, TextTask
from ..tasks.images import DEVICE_LIMIT_BYTES
from ...trace.batches import map_tensors, tensors_of
from . import snapshot
from ...step.apply import apply
from ...step.step import Step
from ...step.distributed import average_statistics, own_tensors
from .folder import writing
from ...step.group import (ShardingName, from_all, largest, on_first, rank, ranks)
from .job import job_for
from ...step.predict import predict_step
from .settings import AnySettings

MEASURED_UPDATE = 2
"""The third: optimizer state exists, and on CUDA the step is captured. Other shapes follow."""

STATE = frozenset(
    "settings predicted step random done score loss_sum loss_count measured_peak_bytes "
    "measured_shapes seconds records_bytes".split()
)
"""The keys of a snapshot."""


class Trainer:
    """Everything that changes while a run goes on; `state_dict` is what a snapshot holds."""

    def __init__(
        self,
        settings: AnySettings,
        task: ImageTask | TextTask,
        device: torch.device,
        *,
        predict: bool = True,
        parallel: ShardingName | None = None,
        device_limit_bytes: int = DEVICE_LIMIT_BYTES,
    ) -> None:
        self.settings, self.device = settings, device
        self.parallel = None if ranks() == 1 else parallel or "ddp"
        self.job = job_for(
            settings,
            task,
            device,
            parallel=self.parallel,
            device_limit_bytes=device_limit_bytes,
        )
        self.feed, self.updates = self.job.feed, self.job.updates
        seed_streams(settings.seed)
        model, self.loss = self.job.model()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.predicted = self._predict(model) if predict else {}
        model.to(device)
        optimizer = self.job.optimizer(model, device)
        self.step: Step = apply(
            self.job.plan, model, optimizer, loss=self.loss, parallel=self.job.parallel
        )
        if self.feed.in_place:
            self.step.expect_in_place()
        separate_streams(settings.seed)
        self.done = 0
        """Updates so far."""
        self.score: float | None = None
        """Score of the last evaluation: accuracy in percent, or the job's own."""
        self.best_score: float | None = None
        self.best_epoch = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Since the last evaluation; it stays on the device."""
        self.loss_count = 0
        self.measured_peak_bytes = 0
        """Of the training so far, without the data set."""
        self._measured: list[str] = []
        """Shapes of the batches that were; equal on all ranks, which measure together."""
        self.seconds = 0.0
        """Spent by those who trained before this one."""
        self._started = time.monotonic()

    def _predict(self, model: torch.nn.Module) -> dict[str, int | None]:
        """Both peaks of the largest batch, before anything is allocated; None where unknown."""
        plan, batch = self.job.plan, self.job.sample()
        optimizer = self.job.optimizer(model, torch.device("cpu"))
        made: dict[str, int | None] = {"fundamental_peak_bytes": None, "step_peak_bytes": None}
        if self.parallel == "fsdp":
            return made
        with suppress(ShoestringError):  # microbatches that do not divide the batch, for one
            made["fundamental_peak_bytes"] = profile(
                model, batch, loss=self.loss, optimizer=optimizer, techniques=plan.techniques
            ).peak_bytes
        kind = plan.input_dtype
        fed = map_tensors(lambda t: t.to(kind) if t.is_floating_point() else t, batch)
        optimizer = self.job.optimizer(model, self.device)
        step = predict_step(
            plan, model, fed, loss=self.loss, optimizer=optimizer, device=self.device.type
        )
        made["step_peak_bytes"] = step.peak_bytes
        return made

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.done // self.feed.steps_per_epoch

    @property
    def epochs(self) -> int:
        """Until the last update; the last may end early."""
        return -(-self.updates // self.feed.steps_per_epoch)

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the last update was an epoch's last."""
        return self.done % self.feed.steps_per_epoch == 0

    @property
    def total_seconds(self) -> float:
        """Of all who worked on this run."""
        return self.seconds + time.monotonic() - self._started

    def advance(self) -> None:
        """One update; nothing here waits for the device."""
        epoch, number = divmod(self.done, self.feed.steps_per_epoch)
        rate = self.job.learning_rate(self.done)
        for group in self.step.optimizer.param_groups:
            if group["lr"] != rate:
                group["lr"] = rate
        batch = self.feed.batch(epoch, number)
        shapes = self._shapes(batch)
        measured = shapes in self._measured or self.done < min(MEASURED_UPDATE, self.updates - 1)
        if not measured and self.step.measurable:
            self._note_peak(self.step.measure(batch).peak_bytes)
            self._measured.append(shapes)
            loss = self.step.loss
        else:
            loss = self.step(batch)
        assert loss is not None
        self.loss_sum.add_(loss)
        self.loss_count += 1
        self.done += 1

    def _shapes(self, batch: Any) -> str:
        """The same words on all ranks: of shares, which can be unequal, only how many there are."""
        if self.job.parallel is not None and self.job.parallel.batches == "shares":
            return f"shares of {ranks()}"
        return str([list(tensor.shape) for tensor in tensors_of(batch)])

    def _note_peak(self, peak_bytes: int) -> None:
        """Of the rank that takes most.

        The CPU's count is of the step alone; the allocator's has the data set in it.
        """
        self.measured_peak_bytes = max(
            self.measured_peak_bytes, largest(peak_bytes) - self.feed.resident_bytes
        )

    def train_loss(self) -> float:
        """Mean since the last evaluation; waits for the device."""
        return float(self.loss_sum) / max(self.loss_count, 1)

    def loss_scale(self) -> float | None:
        """Of FP16; waits for the device."""
        scale = self.step.loss_scale
        return None if scale is None else float(scale)

    def trouble(self) -> str | None:
        """Why it makes no sense to go on, or None; waits for the device."""
        if not math.isfinite(self.train_loss()):
            return f"the training loss is not finite after update {self.done:,}"
        scale = self.loss_scale()
        if scale is not None and scale < 1:
            return f"the loss scale fell to {scale:g} by update {self.done:,}: gradients overflow"
        held = own_tensors(self.step.model)
        finite = [t.detach().isfinite().all() for t in held if t.is_floating_point()]
        if not bool(torch.stack(finite).all()):
            return f"a weight is not finite after update {self.done:,}"
        return None

    def evaluate(self) -> dict[str, Any]:
        """The fields of an evaluation event: scores on the held-out data, and the state of the run."""
        if self.device.type == "cuda":
            peak_bytes = max(torch.cuda.max_memory_allocated(), self.step.captured_peak_bytes)
            self._note_peak(peak_bytes)
            torch.cuda.reset_peak_memory_stats()
        model = self.step.model
        average_statistics(model)
        training = [(module, module.training) for module in model.modules()]
        model.eval()
        with torch.no_grad():
            found = self.job.evaluate(model)
        for module, was in training:  # some are frozen
            module.training = was
        self.score = found[self.job.score]
        best = self.best_score
        if best is None or math.isnan(best) or self._better(self.score, best):
            self.best_score, self.best_epoch = self.score, self.epoch
        made = {
            "epoch": self.epoch,
            "step": self.done,
            "learning_rate": self.step.optimizer.param_groups[0]["lr"],
            "train_loss": self.train_loss(),
            **found,
            f"best_{self.job.score}": self.best_score,
            "best_epoch": self.best_epoch,
            "loss_scale": self.loss_scale(),
            **self.step.counts,
            "measured_peak_bytes": self.measured_peak_bytes,
            "seconds": round(self.total_seconds, 3),
        }
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated() - self.feed.resident_bytes
            made["evaluation_peak_bytes"] = used
            torch.cuda.reset_peak_memory_stats()
        self.loss_sum.zero_()
        self.loss_count = 0
        return made

    def _better(self, one: float, other: float) -> bool:
        return one > other if self.job.higher_is_better else one < other

    def scores(self) -> dict[str, Any]:
        """The last and the best, for the end of a run."""
        name = self.job.score
        best = {f"best_{name}": self.best_score, "best_epoch": self.best_epoch}
        return {name: self.score, **best}

    @property
    def keeps_weights(self) -> bool:
        """Whether the weights of now go into the average at the end."""
        last = self.updates // self.feed.steps_per_epoch
        return self.at_end_of_epoch and self.epoch > last - self.job.weights_kept

    def finish(self, folder: Path) -> dict[str, Any]:
        """Run the job's last work, after training; not with a sharded model."""
        if self.parallel == "fsdp":
            return {}
        kept = snapshot.found(folder, "weights")
        return on_first(writing(folder)(lambda: self.job.finish(self.step.model, folder, kept)))

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on, bit for bit."""
        return {
            "settings": self.settings.as_dict(),
            "predicted": self.predicted,
            "step": self.step.state_dict(),
            "random": from_all(random_state()),
            "done": self.done,
            "score": [self.score, self.best_score, self.best_epoch],
            "loss_sum": self.loss_sum.cpu(),
            "loss_count": self.loss_count,
            "measured_peak_bytes": self.measured_peak_bytes,
            "measured_shapes": list(self._measured),
            "seconds": self.total_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; InputError for what no run like this one has saved."""
        try:
            self._load(state)
        except ShoestringError:
            raise
        except Exception as error:  # of a file that was made or changed by hand, anything
            raise InputError(
                f"the snapshot does not fit the run: {type(error).__name__}: {first_line(error)}",
                hint="start again in another folder",
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        self.settings.check_same(state["settings"])
        _check_numbers(state, self.updates)
        self.predicted = state["predicted"]
        self._load_step(state["step"])
        if len(state["random"]) == ranks() or rank() == 0:
            set_random_state(state["random"][rank()])
        else:
            separate_streams(self.settings.seed, state["done"])
        self.done = state["done"]
        self.score, self.best_score, self.best_epoch = state["score"]
        self.loss_sum.copy_(state["loss_sum"])
        self.loss_count = state["loss_count"]
        self.measured_peak_bytes = state["measured_peak_bytes"]
        self._measured = list(state["measured_shapes"])
        self.seconds = state["seconds"]
        self._started = time.monotonic()

    def _load_step(self, state: dict[str, Any]) -> None:
        """The snapshot may come from another device: kernels stay those of this one."""
        optimizer = self.step.optimizer
        own = [{k: g.get(k) for k in _KERNELS if k in g} for g in optimizer.param_groups]
        self.step.load_state_dict(state)
        for group, kernels in zip(optimizer.param_groups, own, strict=True):
            group.update(kernels)
            for parameter in group["params"]:
                held = optimizer.state.get(parameter, {})
                if isinstance(held.get("step"), torch.Tensor) and kernels.get("fused"):
                    held["step"] = held["step"].to(parameter.device)


_KERNELS = ("fused", "capturable")


def _check_numbers(state: dict[str, Any], updates: int) -> None:
    """ValueError for counters that cannot be."""
    for name, most in (("done", updates), ("loss_count", updates), ("records_bytes", 2**62)):
        if name in state and not (type(state[name]) is int and 0 <= state[name] <= most):
            raise ValueError(f"{name} is {state[name]!r:.50}")
    peak, score = state["measured_peak_bytes"], state["score"]
    if type(peak) is not int or not isinstance(state["seconds"], (int, float)):
        raise ValueError("what was measured is not a number")
    if len(score) != 3 or not all(v is None or isinstance(v, (int, float)) for v in score):
        raise ValueError("the score is not a number")
    if type(state["predicted"]) is not dict or not all(
        v is None or type(v) is int for v in state["predicted"].values()
    ):
        raise ValueError("the prediction is not a number of bytes")
    if not all(type(shapes) is str for shapes in state["measured_shapes"]):
        raise ValueError("the shapes that were measured are not texts")


def separate_streams(seed: int, *more: int) -> None:
    """Every rank but the first draws its own numbers, dropout's for instance."""
    if rank() > 0:
        state = np.random.SeedSequence([seed, rank(), *more]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0] >> np.uint64(1)))


def prepare_device(name: str | None, *, tf32: bool, benchmark: bool) -> torch.device:
    """The device to train on (cuda where there is one), set up for numbers that can be stated.

    cuBLAS gets no workspace of its own unless CUBLAS_WORKSPACE_CONFIG says otherwise: it
    would take tens of MiB (`devices/`). FP32 is FP32 unless `tf32`.
    """
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(f"no device is called {wanted!r}", hint="cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"training on {device.type} is not supported", hint="cpu or cuda")
    if device.type == "cuda":
        share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100")
        if share != "100":  # of FP16 products without a workspace; which kernel is not known
            raise InputError(
                f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is {share}: under it losses came out as NaN",
                hint="unset it; MPS shares a GPU without it too",
            )
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"there is no {wanted} here", hint="--device cpu")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = benchmark
    return device


def seed_streams(seed: int) -> None:
    """Start every global generator a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Of every global generator a model may draw from, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Take them all back; the GPU's only where there is one."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
