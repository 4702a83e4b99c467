"""Plans and certificates of models that the project is not developed with.

Every stranger is planned for 80, 55, 35 and 20% of what its plain step takes. A loop of this file's
own, which uses nothing of shoestring's but the step it checks, trains plainly and by the plan and
compares gradients, buffers and peaks. Three questions: is a plan that is called lossless right,
does the certificate say so, and does the peak stay within the budget.

    python benchmarks/strangers.py                       # all, on the CPU
    python benchmarks/strangers.py gemma2 vae --out r.jsonl
    python benchmarks/strangers.py --device cuda --scale 4
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import shoestring as ss
from stranger_models import STRANGERS, Stranger

FRACTIONS = (0.80, 0.55, 0.35, 0.20)
SLACK = 1e-3
"""Relative error of FP32 gradients, in L2 over all of them, that no rounding explains."""
FAR, FAR_TENSOR = 0.2, 0.8
"""What 16 bits may change all gradients by, and one tensor, to be called near."""
TENSOR_SLACK = 2e-2
"""The same of one tensor, which has at least a thousandth of the norm of all."""


# -- a plain loop ----------------------------------------------------------------------------------


class Seen:
    """What one step made: loss, gradients before the update, buffers after it."""

    def __init__(self) -> None:
        self.loss = torch.zeros(())
        self.gradients: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}

    def note(self, model: nn.Module, scale: Any = None) -> None:
        """Copy the gradients, without a loss scale."""
        for name, p in model.named_parameters():
            if p.grad is not None:
                held = p.grad.detach().double()
                self.gradients[name] = held if scale is None else held / float(scale)


def plain_step(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> Seen:
    """Forward, backward, update."""
    seen = Seen()
    optimizer.zero_grad(set_to_none=True)
    value = loss(model, batch)
    value.backward()
    seen.loss = value.detach().double()
    seen.note(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seen.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
    return seen


def planned_step(step: Any, batch: Any) -> Seen:
    """The same by a step of the library."""
    seen = Seen()
    handle = step.optimizer.register_step_pre_hook(
        lambda *_: seen.note(step.model, step.loss_scale)
    )
    seen.loss = step(batch).detach().double()
    handle.remove()
    seen.buffers = {n: b.detach().clone() for n, b in step.model.named_buffers()}
    return seen


def apart(expected: Seen, found: Seen) -> tuple[float, float]:
    """Relative L2 error of all gradients, and of the worst tensor."""
    if expected.gradients.keys() != found.gradients.keys():
        return float("inf"), float("inf")
    norm = sum(float(g.norm()) ** 2 for g in expected.gradients.values()) ** 0.5
    total, worst = 0.0, 0.0
    for name, plain in expected.gradients.items():
        error = float((plain - found.gradients[name]).norm())
        total += error**2
        worst = max(worst, error / max(float(plain.norm()), 1e-3 * norm, 1e-30))
    return total**0.5 / max(norm, 1e-30), worst


def buffers_apart(expected: Seen, found: Seen) -> float:
    """The worst relative error of a buffer."""
    worst = 0.0
    for name, plain in expected.buffers.items():
        other = found.buffers.get(name)
        if other is None or not plain.is_floating_point():
            continue
        error = float((plain.double() - other.double()).norm())
        worst = max(worst, error / max(float(plain.double().norm()), 1e-12))
    return worst


# -- draws of its own ------------------------------------------------------------------------------


class PerExample(TorchFunctionMode):
    """Every example draws from a stream of its own: by its number and the number of the call."""

    def __init__(self, first: int, rows: int) -> None:
        super().__init__()
        self._first, self._rows, self._calls = first, rows, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("dropout", "dropout2d") and func in (F.dropout, F.dropout2d):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            p = given.get("p", 0.5)
            if not given.get("training", True) or p == 0:
                return given["input"]
            x = given["input"]
            shape = x.shape[:2] if name == "dropout2d" else x.shape
            kept = self._filled(torch.empty(shape), "rand").to(x.device) >= p
            mask = kept[(...,) + (None,) * (x.dim() - kept.dim())]
            return x * mask.to(x.dtype) / (1 - p)
        if name == "scaled_dot_product_attention" and kwargs.get("dropout_p", 0):
            raise NotImplementedError("dropout inside attention")
        if name in ("rand", "randn", "rand_like", "randn_like", "randint"):
            made = func(*args, **kwargs)
            bounds = [a for a in args if isinstance(a, int)] if name == "randint" else []
            drawn = self._filled(torch.empty(made.shape), name.partition("_")[0], bounds)
            return made.copy_(drawn.to(made.dtype))
        if name in ("bernoulli_", "normal_", "uniform_", "multinomial", "lstm", "gru"):
            dropped = name in ("lstm", "gru") and float(args[5]) > 0 and args[6]
            if name not in ("lstm", "gru") or dropped:
                raise NotImplementedError(f"draws of {name}")
        return func(*args, **kwargs)

    def _filled(self, out: Tensor, kind: str, bounds: Any = ()) -> Tensor:
        self._calls += 1
        rows = out.shape[0] if out.dim() else 0
        split = rows and rows % self._rows == 0
        blocks = out.chunk(self._rows) if split else (out,)
        for number, block in enumerate(blocks):
            seed = self._calls * 100_003 + (self._first + number + 1 if split else 0)
            stream = torch.Generator().manual_seed(seed)
            if kind == "randint":
                low, high = (0, bounds[0]) if len(bounds) == 1 else bounds[:2]
                block.copy_(torch.randint(low, high, block.shape, generator=stream))
            elif kind == "randn":
                block.copy_(torch.randn(block.shape, generator=stream))
            else:
                block.copy_(torch.rand(block.shape, generator=stream))
        return out


def by_example(loss: Any) -> Any:
    """The loss, with draws that do not depend on which examples run together."""

    def wrapped(model: nn.Module, batch: Any) -> Tensor:
        first = next(t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim())
        start = first.storage_offset() // max(first.stride(0), 1)
        with PerExample(start, first.shape[0]):
            value: Tensor = loss(model, batch)
        return value

    return wrapped


# -- memory ----------------------------------------------------------------------------------------


def peak_of(run: Callable[[], Any], held: list[Tensor], device: str) -> int:
    """Bytes at the peak, by the allocator's own events; what is held between steps included."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    there = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU],
                                profile_memory=True) as seen:  # fmt: skip
        run()
    events = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = peak = 0
    for _, nbytes in changes:
        total += nbytes
        peak = max(peak, total)
    return there + peak


def held_by(model: nn.Module, optimizer: Any, batch: Any) -> list[Tensor]:
    """All tensors that exist between two steps."""
    state = [t for s in optimizer.state.values() for t in tree_leaves(s)]
    own = [*model.parameters(), *model.buffers(), *state, *tree_leaves(batch)]
    return [t for t in own if isinstance(t, Tensor)]


# -- a stranger ------------------------------------------------------------------------------------


class Case:
    """A stranger on a device, made anew for every loop."""

    def __init__(self, stranger: Stranger, scale: int, device: str) -> None:
        self.stranger, self.device = stranger, device
        torch.manual_seed(0)
        model, batch, self.loss = stranger.build(scale)
        self.model = model.to(device)
        self.batch = tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, batch)

    def fresh(self) -> tuple[nn.Module, Any]:
        """A copy and its optimizer."""
        model = copy.deepcopy(self.model)
        return model, self.stranger.optimizer_for(model)

    def plain(self, loss: Any = None, *, wide: bool = False) -> Seen:
        """One plain step from the same seed."""
        model, optimizer = self.fresh()
        batch = self.batch
        if wide:
            model = model.double()
            optimizer = self.stranger.optimizer_for(model)
            batch = tree_map(
                lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t,
                batch,
            )
        torch.manual_seed(7)
        return plain_step(model, batch, loss or self.loss, optimizer)

    def planned(self, plan: Any, loss: Any = None) -> Seen:
        """One step by a plan from the same seed."""
        model, optimizer = self.fresh()
        step = ss.apply(plan, model, optimizer, loss=loss or self.loss)
        step.use_graph(False)
        for _ in range(30):
            torch.manual_seed(7)
            seen = planned_step(step, self.batch)
            if all(bool(torch.isfinite(g).all()) for g in seen.gradients.values()):
                return seen  # FP16's scale has come down, and nothing has moved so far
        return seen

    def plain_peak(self) -> int:
        """Of a steady step."""
        model, optimizer = self.fresh()
        run = lambda: plain_step_quiet(model, self.batch, self.loss, optimizer)  # noqa: E731
        run()
        return peak_of(run, held_by(model, optimizer, self.batch), self.device)

    def planned_peak(self, plan: Any) -> int:
        """Of a steady step."""
        model, optimizer = self.fresh()
        step = ss.apply(ss.Plan.of(plan), model, optimizer, loss=self.loss)
        step(self.batch)
        step(self.batch)
        held = held_by(model, optimizer, self.batch)
        return peak_of(lambda: step(self.batch), held, self.device)


def plain_step_quiet(model: nn.Module, batch: Any, loss: Any, optimizer: Any) -> None:
    """A plain step that keeps nothing."""
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def truth(case: Case, plan: Any) -> dict[str, Any]:
    """How far the plan's gradients are from plain ones, and what rounding explains."""
    techniques = {t.name: t for t in plan.techniques}
    micro, kept = techniques.get("microbatching"), dict(techniques)
    plans = [(plan, case.loss)]
    if micro is not None and case.stranger.random:
        kept.pop("microbatching")
        parts = {n: t for n, t in techniques.items() if n != "checkpointing"}
        plans = [(list(parts.values()), by_example(case.loss)), (list(kept.values()), case.loss)]
    worst = {"error": 0.0, "tensor": 0.0, "buffers": 0.0, "loss": 0.0}
    for chosen, loss in plans:
        expected, found = case.plain(loss), case.planned(chosen, loss)
        total, tensor = apart(expected, found)
        worst["error"], worst["tensor"] = max(worst["error"], total), max(worst["tensor"], tensor)
        worst["buffers"] = max(worst["buffers"], buffers_apart(expected, found))
        off = float(abs(expected.loss - found.loss) / max(abs(float(expected.loss)), 1e-12))
        worst["loss"] = max(worst["loss"], off)
    try:
        noise = apart(case.plain(wide=True), case.plain()) if not case.stranger.random else None
    except (RuntimeError, ValueError, TypeError):
        noise = None
    kinds = {p.dtype for p in case.model.parameters()}
    narrow = "autocast" in case.stranger.name or torch.bfloat16 in kinds
    base = (SLACK, TENSOR_SLACK) if not narrow else (0.02, 0.1)
    limits = base if noise is None else (max(base[0], 4 * noise[0]), max(base[1], 4 * noise[1]))
    worst["limit"], worst["tensor_limit"] = limits
    right = worst["error"] <= limits[0] and worst["tensor"] <= limits[1]
    return {**worst, "right": right and worst["buffers"] <= 1e-3}


def examine(case: Case, plain_bytes: int, fraction: float) -> dict[str, Any]:
    """One plan of one stranger."""
    stranger = case.stranger
    row: dict[str, Any] = {
        "name": stranger.name, "family": stranger.family, "fraction": fraction,
        "plain_bytes": plain_bytes, "budget_bytes": int(plain_bytes * fraction),
        "device": case.device,
    }  # fmt: skip
    model, optimizer = case.fresh()
    started = time.perf_counter()
    plan = None
    for allow in ("lossless", None):
        try:
            plan = ss.plan(model, case.batch, loss=case.loss, optimizer=optimizer,
                           budget=row["budget_bytes"], allow=allow)  # fmt: skip
            break
        except ss.BudgetError as error:
            row["refused"] = f"{error.message}; {error.hint}"
        except ss.ShoestringError as error:
            row["untraced"] = f"{type(error).__name__}: {error.message}"
            break
    row["plan_seconds"] = time.perf_counter() - started
    if plan is None:
        row["verdict"] = "untraced" if "untraced" in row else "no plan"
        return row
    row |= {"kind": plan.kind, "plan": plan.to_dict(), "short": plan.short()}
    row["why"] = {c.part: c.why for c in plan.choices}
    row["measured_bytes"] = case.planned_peak(plan)
    row["holds"] = row["measured_bytes"] <= row["budget_bytes"]
    try:
        row["truth"] = truth(case, plan)
    except NotImplementedError as error:
        row["truth"] = None
        row["unchecked"] = str(error)
    started = time.perf_counter()
    certificate = ss.verify(plan, model, [case.batch], loss=case.loss, optimizer=optimizer, steps=2)
    row["verify_seconds"] = time.perf_counter() - started
    values = all(c.ok for c in certificate.comparisons)
    row |= {"verified": values, "peak_ok": certificate.peak_ok}
    row["broken"] = [f"{c.what}: {c.why}" for c in certificate.comparisons if not c.ok]
    row["verdict"] = verdict(row)
    return row


def verdict(row: dict[str, Any]) -> str:
    """One word: ok, or what is wrong."""
    found = row["truth"]
    wrong = found is not None and not found["right"]
    if row["kind"] == "lossless" and wrong:
        return "WRONG PLAN" if not row["verified"] else "FALSE CERTIFICATE"
    near = row["kind"] == "near-lossless" and found is not None
    if near and (found["error"] > FAR or found["tensor"] > FAR_TENSOR):
        return "FAR" if row["verified"] else "far, and told"
    if not row["verified"]:
        return "FALSE ALARM" if found is not None else "alarm, unchecked"
    if not row["holds"]:
        return "OVER BUDGET"
    return "ok" if found is not None else "ok, unchecked"


def line(row: dict[str, Any]) -> str:
    """Of the table; sizes in MB (10^6 bytes)."""
    measured = row.get("measured_bytes")
    found = row.get("truth")
    shown = "-" if measured is None else f"{measured / 1e6:.3f}"
    error = "-" if found is None else f"{found['error']:.0e}"
    says = {True: "ok", False: "FAILS", None: "-"}[row.get("verified")]
    note = row.get("short") or row.get("untraced") or row.get("failed") or row.get("refused", "")
    return (
        f"{row['name']:<22}{row['fraction']:>5.0%}{row['plain_bytes'] / 1e6:>9.3f}"
        f"{row['budget_bytes'] / 1e6:>9.3f}{shown:>9}  {row.get('kind', '-'):<14}{error:>7}  "
        f"{says:<6}{row['verdict']:<18}{note[:90]}"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings; what they say is in the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Examine the strangers that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--budgets", default=",".join(map(str, FRACTIONS)))
    parser.add_argument("--out", default=None, help="JSON lines, one for each plan")
    options = parser.parse_args()
    try:
        import transformers

        transformers.logging.set_verbosity_error()
    except ImportError:
        sys.exit("strangers need transformers")
    chosen = [s for s in STRANGERS.values()
              if not options.names or any(part in s.name for part in options.names)]  # fmt: skip
    fractions = [float(text) for text in options.budgets.split(",")]
    out = None if options.out is None else Path(options.out).open("w")  # noqa: SIM115
    print(f"# {provenance(options)}", flush=True)
    rows = []
    for stranger in chosen:
        with quiet():
            made = _rows(stranger, fractions, options)
        for row in made:
            rows.append(row)
            print(line(row), flush=True)
            if out is not None:
                out.write(json.dumps(row, default=str) + "\n")
                out.flush()
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    print(f"{len(chosen)} strangers, {len(rows)} budgets: {counts}")
    sys.exit(any(word.isupper() for verdict in counts for word in verdict.split()))


def _rows(stranger: Stranger, fractions: list[float], options: Any) -> Iterator[dict[str, Any]]:
    base = {"name": stranger.name, "family": stranger.family, "device": options.device}
    try:
        case = Case(stranger, options.scale, options.device)
        plain_bytes = case.plain_peak()
    except Exception as error:
        yield {**base, "fraction": 1.0, "plain_bytes": 0, "budget_bytes": 0, "failed": repr(error),
               "verdict": "CANNOT RUN"}  # fmt: skip
        return
    for fraction in fractions:
        try:
            yield examine(case, plain_bytes, fraction)
        except Exception as error:
            yield {**base, "fraction": fraction, "plain_bytes": plain_bytes,
                   "budget_bytes": int(plain_bytes * fraction), "verdict": "ERROR",
                   "failed": f"{type(error).__name__}: {error}",
                   "traceback": traceback.format_exc()}  # fmt: skip
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def provenance(options: Any) -> str:
    """Where these numbers come from."""
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, 1 thread"
    return (
        f"python {' '.join(sys.argv)}; {time.strftime('%Y-%m-%d')}; {device}; Python "
        f"{platform.python_version()}, torch {torch.__version__}, transformers "
        f"{metadata.version('transformers')}, scale {options.scale}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
