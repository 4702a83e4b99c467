"""Fake copies of a model, its batch and its optimizer: shapes, and no memory."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError, TraceError, needs_extra
from ..torch_private.fake_tensors import FakeTensor, FakeTensorMode, as_parameter, make_fake
from .attributes import results_in
from .batches import check_layouts, map_tensors, sizes_of_packed, tensors_of
from .copies import copied_model
from .values import stand_for

OptimizerLike = torch.optim.Optimizer | str | None
_CPU = torch.device("cpu")

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=5e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adamw8bit": lambda p: _of_bitsandbytes("AdamW8bit", p),
}
"""The optimizers a command line can name; sgd and adam with the report's settings (Table 6)."""


def _of_bitsandbytes(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    with needs_extra("bitsandbytes", "bitsandbytes", "an optimizer with 8-bit state"):
        from bitsandbytes import optim
    made: torch.optim.Optimizer = getattr(optim, name)(parameters, lr=5e-4)
    return made


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether it has a shape and no memory: a prediction, where no number can be asked for."""
    return isinstance(tensor, FakeTensor)


def readable(tensor: torch.Tensor) -> bool:
    """Whether its value can be asked for without waiting for a GPU."""
    return tensor.is_cpu and not is_fake(tensor)


def mode_of(model: nn.Module) -> FakeTensorMode | None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None


def _fakes(tensors: Iterable[torch.Tensor], mode: FakeTensorMode) -> dict[int, torch.Tensor]:
    """A fake for each tensor, by its id; those that share a storage go on sharing it."""
    groups: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    given = {id(t): t for t in tensors}.values()
    check_layouts(given)
    for tensor in given:
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        groups.setdefault(key, []).append(tensor)
    made: dict[int, torch.Tensor] = {}
    with mode, torch.no_grad():
        for (_, dtype), group in groups.items():
            start, end = span(group)
            if len(group) == 1 and end - start == group[0].numel():  # alone and without gaps
                shape, stride = group[0].shape, group[0].stride()
                made[id(group[0])] = make_fake(mode, _CPU, shape, stride, dtype)
                continue
            base = torch.empty(end - start, dtype=dtype)
            for tensor in group:
                offset = tensor.storage_offset() - start
                made[id(tensor)] = base.as_strided(tensor.shape, tensor.stride(), offset).detach()
    return made


def span(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """First element and end of what views of one storage show of it."""
    starts, ends = [], []
    for tensor in tensors:
        starts.append(int(tensor.storage_offset()))
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        ends.append(starts[-1] + (reach + 1 if tensor.numel() else 0))
    return min(starts), max(ends)


def fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    """The batch without its memory; what its whole numbers are can still be asked for."""
    tensors = tensors_of(batch)
    fakes = _fakes(tensors, mode)
    for tensor in tensors:
        stand_for(fakes[id(tensor)], tensor)
    real = {id(tensor) for tensor in sizes_of_packed(batch)}
    return map_tensors(
        lambda t: t if id(t) in real else fakes[id(t)].requires_grad_(t.requires_grad), batch
    )


def fake_model(model: nn.Module, mode: FakeTensorMode) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """A copy of the model whose parameters and buffers are fake; tied ones stay tied."""
    results = list(results_in(model))
    memo: dict[int, Any] = dict(_fakes([*model.parameters(), *model.buffers(), *results], mode))
    mapping: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        fake = as_parameter(memo[id(parameter)], parameter.requires_grad)
        mapping[id(parameter)] = fake
    try:
        made = copied_model(model, memo)
    except Exception as error:
        raise TraceError(
            f"the model could not be copied for tracing: {error}",
            hint="make it deep-copyable, or build it inside the factory given on the command line",
        ) from error
    fakes = {id(fake) for fake in mapping.values()}
    if any(id(parameter) not in fakes for parameter in made.parameters()):
        raise TraceError(
            "a copy of the model has parameters of its own: torch.jit.script's modules copy that "
            "way",
            hint="measure a real step, or give the module as it was before it was scripted",
        )
    for original, module in zip(model.modules(), made.modules(), strict=True):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is None:
            module.momentum = 0.1  # else it reads its count, which is not a number here
        if getattr(original, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl = module._call_impl  # still marked, and as it is written
    return made, mapping


def make_optimizer(
    optimizer: OptimizerLike, model: nn.Module, mapping: dict[int, torch.Tensor]
) -> torch.optim.Optimizer | None:
    """The same optimizer over the fake parameters, with no state but what it starts with."""
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise InputError(
                f"unknown optimizer {optimizer!r}", hint="one of " + ", ".join(sorted(OPTIMIZERS))
            )
        trained: list[torch.Tensor] = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise InputError(
                "nothing to train: none of the model's parameters requires a gradient",
                hint="call model.requires_grad_(True), or unfreeze the part to train",
            )
        made = OPTIMIZERS[optimizer](trained)
        _early_state(made)
        return made
    check_optimizer(optimizer)
    return copied_optimizer(unwrapped(optimizer), mapping, {})


def copied_optimizer(
    optimizer: torch.optim.Optimizer,
    mapping: dict[int, torch.Tensor],
    memo: dict[int, Any],
    own: Callable[[torch.Tensor], torch.Tensor] = lambda held: held,
) -> torch.optim.Optimizer:
    """A copy over other parameters; optimizers it holds, and groups it shares with them, as well.

    `own` makes the copy's tensors from others that it holds in attributes, such as averages of
    weights. Attributes are set on the copy itself, never through properties: those of a wrapper
    write to what it wraps, which is the user's.
    """
    if id(optimizer) in memo:
        found: torch.optim.Optimizer = memo[id(optimizer)]
        return found
    # Not copy.copy: an optimizer's pickled state leaves out what a subclass adds to it.
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = copied
    held = dict(vars(optimizer))
    held.pop("step", None)  # a learning-rate scheduler binds it to the original
    if "param_groups" in held:
        held["param_groups"] = _copied_groups(optimizer.param_groups, mapping, memo)
    if "state" in held:
        state = optimizer.state
        held["state"] = memo.setdefault(id(state), defaultdict(dict))
    for name, value in held.items():
        if name in STEP_HOOKS:  # there, and not called
            held[name] = OrderedDict.fromkeys((k for k, h in value.items() if _is_users(h)), _seen)
        elif name.startswith("_optimizer_") and name.endswith("_hooks"):
            held[name] = OrderedDict()  # what techniques add to the copy is not the user's
        elif name not in ("param_groups", "state"):
            held[name] = _copied_attribute(value, mapping, memo, own)
    vars(copied).update(held)
    if "state" in held:
        _early_state(copied)
    return copied


STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
EACH = "each_parameter"
"""An attribute of hooks of an optimizer's step that may be called for one parameter at a time."""


def hooks_its_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of the user's looks at all gradients, or weights, around a step."""
    return any(_is_users(h) for name in STEP_HOOKS for h in getattr(optimizer, name, {}).values())


def _is_users(hook: Any) -> bool:
    return not getattr(hook, EACH, False)


def _seen(*_: Any) -> None:
    """In the place of a hook of the user's, on a copy of the optimizer."""


def _copied_attribute(value: Any, mapping: dict[int, torch.Tensor], memo: Any, own: Any) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.optim.Optimizer):
        return copied_optimizer(value, mapping, memo, own)
    if isinstance(value, torch.Tensor):
        return mapping[id(value)] if id(value) in mapping else own(value)

    def inside(held: Any) -> Any:
        return _copied_attribute(held, mapping, memo, own)

    if isinstance(value, dict):
        memo[id(value)] = made = copy.copy(value)
        made.clear()
        made.update((inside(key), inside(held)) for key, held in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(map(inside, value))
    return value


def _copied_groups(groups: Any, mapping: dict[int, torch.Tensor], memo: dict[int, Any]) -> Any:
    if id(groups) not in memo:
        check_holds_only(groups, mapping)
        memo[id(groups)] = [
            {**group, "params": [mapping[id(p)] for p in group["params"]]} for group in groups
        ]
    return memo[id(groups)]


def check_holds_only(groups: Any, own: Container[int]) -> None:
    """Refuse an optimizer over others than the model's parameters, whose ids are given.

    Those of a loss (class centers, weights of tasks) train with the model if they are in it.
    """
    strange = [p for group in groups for p in group["params"] if id(p) not in own]
    if strange:
        shape = "×".join(map(str, strange[0].shape)) or "one number"
        raise InputError(
            f"the optimizer holds parameters that are not the model's: {len(strange)}, "
            f"the first of shape {shape}",
            hint="build the optimizer from model.parameters(). If the loss has parameters: "
            "both = nn.ModuleList([model, head]), with the optimizer and a loss "
            "(both, batch) over both",
        )


def unwrapped(optimizer: Any) -> Any:
    """The optimizer behind wrappers that pass everything on, as accelerate's and Lightning's do.

    They have its very groups and state. One with a state of its own is an optimizer, whatever it
    holds.
    """
    seen = {id(optimizer)}
    while True:
        held = (getattr(optimizer, name, None) for name in ("optimizer", "_optimizer"))
        inner = next((o for o in held if isinstance(o, torch.optim.Optimizer)), None)
        if inner is None or id(inner) in seen or not _passes_on(optimizer, inner):
            return optimizer
        seen.add(id(inner))
        optimizer = inner


def _passes_on(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    groups, state = (getattr(wrapper, name, None) for name in ("param_groups", "state"))
    return groups is inner.param_groups and state is inner.state


def adds_to_the_step(optimizer: Any) -> bool:
    """Whether `step` may do more than the optimizer's own, such as clipping gradients.

    That of a wrapper may, but for accelerate's and Lightning's, where they scale nothing. So may
    one that was set on the optimizer itself.
    """
    if _step_set_on(unwrapped(optimizer)):
        return True
    library = type(optimizer).__module__.partition(".")[0]
    known = library in ("accelerate", "lightning", "pytorch_lightning")
    return unwrapped(optimizer) is not optimizer and not known


def passing_on(step: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """A step to set on an optimizer, which does no more to parameters than the one before it."""
    step.__wrapped__, step.passes_on = before, True  # type: ignore[attr-defined]
    return step


def _step_set_on(optimizer: Any) -> bool:
    """Learning-rate schedulers set one that counts its calls and does nothing else."""
    step: Any = getattr(optimizer, "__dict__", {}).get("step")
    while (
        getattr(step, "passes_on", False)
        or getattr(step, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler"
    ):
        step = step.__wrapped__
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def _early_state(optimizer: torch.optim.Optimizer) -> None:
    """Adagrad makes its state with itself, also that of parameters no step uses."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p, FakeTensor):  # its count would be real, and could not be read
                    count = p.new_zeros((), dtype=torch.float32)
                    optimizer.state[p] = {"step": count, "sum": torch.empty_like(p)}


LATE = 600
"""A number of steps after which an update takes what it takes from then on: RAdam's takes less for
five. It divides by most numbers that some work is done every so many steps for."""


def late_in_training(optimizer: torch.optim.Optimizer) -> None:
    """Let the next step that it counts be one late in training.

    Of the parameters that its groups hold now: released gradients have one step for each.
    """
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in stepped if p in optimizer.state]
    for held in (*states, *optimizer.param_groups):
        count = held.get("step")
        count = count.constant if isinstance(count, FakeTensor) else count
        if isinstance(count, torch.Tensor):
            count.clamp_(min=LATE - 1)
        elif isinstance(count, (int, float)) and 0 < count < LATE:
            held["step"] = type(count)(LATE - 1)


def check_optimizer(optimizer: Any) -> None:
    """An object with parameters; not its class, nor a name where one has to be there.

    And one that takes a step from one gradient.
    """
    if not hasattr(optimizer, "param_groups") or not hasattr(type(optimizer), "step"):
        raise InputError(
            f"{optimizer!r} is not an optimizer",
            hint="build one, such as torch.optim.SGD(model.parameters(), lr=0.1)",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise needs_closure(type(optimizer).__name__)


def needs_closure(name: str) -> InputError:
    """Of an optimizer that takes more than one gradient a step."""
    return InputError(
        f"{name} runs the loss by itself, several times a step",
        hint="use SGD, Adam or another optimizer of one gradient",
    )


def default_to_foreach(optimizer: torch.optim.Optimizer) -> None:
    """On CUDA an optimizer with no choice made runs over all tensors at once.

    One that is capturable refuses to run on fake tensors, which are on no CUDA device; the same
    update without it takes as much memory, but for counts of steps, which stay on the device.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
        if group.get("capturable") and not group.get("fused"):
            group["capturable"], group["counts_on_device"] = False, True


@contextmanager
def same_random_streams() -> Iterator[None]:
    """Leave the user's random streams where they were."""
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.set_state(streams[2])
        for number, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, number)
