"""The model a command line names: a built-in one, or an importable factory and its inputs."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import nn

from ..errors import InputError, first_line
from ..integrations.configurations import PREFIXES, Configured, loss_of
from ..techniques.plan import Plan, from_flags
from ..torch_private.dispatch import TorchDispatchMode
from ..torch_private.fake_tensors import FakeTensorMode, converted_in_place
from ..torch_private.trees import tree_leaves
from ..trace.failures import unlogged
from .models import builtin

_TYPES = {
    name: getattr(torch, name)
    for name in ("float16", "bfloat16", "float32", "float64", "int32", "int64", "bool")
}

LARGEST_BATCH = 10**9
"""Byte counts of larger ones would not fit the 64 bits tensors count in."""


@dataclass(frozen=True)
class Target:
    """A model, with the batch that runs at once and its loss."""

    name: str
    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: str
    batch_size: int
    batch_unit: str


@dataclass(frozen=True)
class InputSpec:
    """One tensor of the batch: `[name=]8x3x224x224[:dtype]`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> InputSpec:
        """Read one `--input`."""
        match = re.fullmatch(r"(?:([A-Za-z_]\w*)=)?([0-9]+(?:x[0-9]+)*)(?::(\w+))?", text.strip())
        if match is None:
            raise InputError(
                f"cannot read the input {text!r}",
                hint="write 8x3x224x224, 8x128:int64 or input_ids=8x128:int64",
            )
        kind = match[3] or "float32"
        if kind not in _TYPES:
            raise InputError(
                f"unknown type {kind!r} in the input {text!r}", hint="one of " + ", ".join(_TYPES)
            )
        sizes = match[2].split("x")
        if max(map(len, sizes)) > 18:  # Python itself reads no more than 4,300 digits
            raise InputError("an input is larger than a tensor can be", hint="use smaller sizes")
        shape = tuple(map(int, sizes))
        if 0 in shape:
            raise InputError(f"the input {text!r} has an empty dimension", hint="sizes from 1")
        return cls(shape, _TYPES[kind], match[1])


def batch_unit(name: str) -> str:
    """The unit of a batch's size: images, tokens or examples."""
    if name.startswith(PREFIXES):
        return "examples"
    return "examples" if ":" in name else builtin(name).batch_unit


def flagged_plan(name: str, given: Mapping[str, Any]) -> Plan:
    """The size that flags ask for, in the unit of the model."""
    return from_flags(given, batch_unit(name))


def _part(plan: Plan, data: Any) -> Any:
    """The part of a batch that runs at once; `profile` makes other changes of it."""
    for technique in plan.techniques:
        if technique.at_once is not None:
            data = technique.prepare(data)
    return data


def at_once(plan: Plan) -> Plan:
    """The plan without its microbatches, for a batch that is one microbatch already."""
    return Plan(technique for technique in plan.techniques if technique.at_once is None)


def resolve(
    name: str,
    inputs: Sequence[str] = (),
    *,
    batch: int | None = None,
    plan: Plan | None = None,
    loss: str | None = None,
    real: bool = False,
    how: Mapping[str, Any] | None = None,
) -> Target:
    """Build what the command line names, on fake tensors; `how` is for configurations.

    With a plan the batch is the part of the minibatch that runs at once.

    `real`: on tensors with memory and random data, integers 0 or 1 for an imported model.
    """
    if batch is not None and not 1 <= batch <= LARGEST_BATCH:
        raise InputError(
            f"a batch cannot have a size of {batch}",
            hint=f"a whole number from 1 to {LARGEST_BATCH:,}",
        )
    if name.startswith(PREFIXES):
        return _configured(name, inputs, batch, plan or Plan(), loss, real, how or {})
    if given := [flag for flag, value in (how or {}).items() if value is not None]:
        raise InputError(
            f"--{given[0]} is for a configuration", hint="hf:FOLDER, hf:NAME or timm:NAME"
        )
    if ":" not in name:
        return _builtin(name, inputs, batch, plan or Plan(), loss, real)
    return _imported(name, inputs, batch, plan or Plan(), loss, real)


def _configured(
    name: str,
    inputs: Sequence[str],
    batch: int | None,
    plan: Plan,
    loss: str | None,
    real: bool,
    how: Mapping[str, Any],
) -> Target:
    """A model of transformers or timm, by its configuration."""
    if inputs or loss or real:
        raise InputError(
            f"{name} is a configuration, without weights or inputs of yours",
            hint="give --tokens and --batch, or package.module:factory with --input",
        )
    given = {key: value for key, value in how.items() if value is not None}
    made = Configured(name, batch=batch or 1, **given)
    model, data = made.build()
    data = _part(plan, data)
    return Target(name, model, data, loss_of, "adamw", made.batch, made.unit)


def _builtin(
    name: str,
    inputs: Sequence[str],
    batch: int | None,
    plan: Plan,
    loss: str | None,
    real: bool,
) -> Target:
    known = builtin(name)
    if inputs or loss:
        raise InputError(
            f"{name} brings its own inputs and loss", hint="use --batch to change its size"
        )
    size = known.default_batch if batch is None else batch
    for technique in plan.techniques:
        technique.check_size(size)
    with nullcontext() if real else _building(), _not_too_large(name):
        model = known.build()
        data = known.batch(size if plan.at_once is None else plan.at_once)
    return Target(name, model, data, known.loss, known.default_optimizer, size, known.batch_unit)


def _imported(
    name: str,
    inputs: Sequence[str],
    batch: int | None,
    plan: Plan,
    loss: str | None,
    real: bool,
) -> Target:
    if not inputs:
        raise InputError(
            f"{name} needs the shapes of its inputs", hint="add --input 8x3x224x224 (repeatable)"
        )
    specs = [InputSpec.parse(text) for text in inputs]
    named = {spec.name is not None for spec in specs}
    if len(named) > 1:
        raise InputError("some inputs have names and some have none", hint="name all or none")
    if True in named and len({spec.name for spec in specs}) < len(specs):
        raise InputError("two inputs have the same name", hint="give every input its own name")
    size = batch if batch is not None else specs[0].shape[0]
    with _importing_from_here():
        loss_function = default_loss if loss is None else _load(loss, "function")
    if real:
        model, fake = build(name), False
    else:
        model, fake = _built_fake(name)
    with _building() if fake else nullcontext():
        shapes = [s.shape if batch is None else (batch, *s.shape[1:]) for s in specs]
        tensors = [_make(s, shape, real) for s, shape in zip(specs, shapes, strict=True)]
    data: Any = tuple(tensors)
    if True in named:
        data = {str(s.name): t for s, t in zip(specs, tensors, strict=True)}
    data = _part(plan, data)
    checked = loss_function if real else _checking_types(loss_function)
    return Target(name, model, data, checked, "sgd", size, "examples")


def _built_fake(name: str) -> tuple[nn.Module, bool]:
    """The model on fake tensors, and whether it is.

    A factory that wants values (for numpy, from a file of weights) is called again, with memory.
    """
    try:
        with _building(), unlogged():
            return build(name), True
    except InputError as error:
        if error.__cause__ is None or isinstance(error.__cause__, (SystemExit, TypeError)):
            raise
        try:
            made = build(name)
        except InputError:
            raise error from error.__cause__
        warnings.warn(f"{error.message}: it was built with memory for its weights", stacklevel=2)
        return made, False


def build(name: str, **sizes: int) -> nn.Module:
    """The model that `package.module:factory` makes.

    A factory with arguments gets those of `sizes` that it names; what it names beside them it must
    have defaults for.
    """
    called = f"may take {' and '.join(sizes)}" if sizes else "is called without arguments"
    hint = f"the factory {called} and returns a torch.nn.Module"
    with _importing_from_here():  # a factory may import what lies beside it
        factory = _load(name)
        if isinstance(factory, nn.Module):
            raise InputError(f"{name} is a model", hint="name a function that returns it")
        try:
            model = factory(**_taken(factory, sizes))
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(
                f"{name} raised {type(error).__name__}: {first_line(error)}", hint=hint
            ) from error
    if isinstance(model, tuple) and any(isinstance(part, nn.Module) for part in model):
        hint = "return the model alone, and name the loss by --loss package.module:function"
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{name} returned {type(model).__name__}, not a torch.nn.Module", hint=hint
        )
    return model


def _taken(factory: Callable[..., Any], sizes: dict[str, int]) -> dict[str, int]:
    try:
        named = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return {}
    return {name: size for name, size in sizes.items() if name in named}


def _make(spec: InputSpec, shape: tuple[int, ...], real: bool) -> torch.Tensor:
    with _not_too_large(f"an input of {'x'.join(map(str, shape))}"):
        if not real:
            return torch.zeros(shape, dtype=spec.dtype)
        if spec.dtype.is_floating_point:
            return torch.randn(shape, dtype=spec.dtype)
        return torch.randint(2, shape, dtype=spec.dtype)


@contextmanager
def _not_too_large(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{what} is larger than a tensor can be", hint="use smaller sizes"
        ) from error


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own `.loss` where it has one, otherwise the mean of its outputs."""
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    own = getattr(out, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    values = out.values() if hasattr(out, "values") and not isinstance(out, torch.Tensor) else out
    leaves = tree_leaves(list(values) if not isinstance(values, torch.Tensor) else values)
    floats = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not floats:
        raise InputError(
            "the model returned no floating-point tensor to take a loss of",
            hint="give a function loss(model, batch) with --loss package.module:function",
        )
    return sum((t.mean() for t in floats[1:]), start=floats[0].mean())


def _checking_types(loss: Callable[[nn.Module, Any], torch.Tensor]) -> Callable[..., Any]:
    def checked(model: nn.Module, batch: Any) -> torch.Tensor:
        with _SameTypes():
            return loss(model, batch)

    return checked


class _SameTypes(TorchDispatchMode):
    """Refuse products of matrices of two types: real tensors do, fake ones let them pass."""

    _products = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in self._products:
            kinds = dict.fromkeys(a.dtype for a in args if isinstance(a, torch.Tensor))
            if len(kinds) > 1:
                names = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
                raise InputError(
                    f"the model multiplies matrices of different types: {names}",
                    hint="give the type the model expects, such as --input 8x128:int64",
                )
        return func(*args, **(kwargs or {}))


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """With the current folder first on the path, as for `python -c`."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")


def _load(name: str, kind: str = "factory") -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        hint = f"write package.module:{kind}, importable from here"
        if module_name.endswith(".py"):
            path = PurePath(module_name)
            hint = f"write {path.stem}:{attribute}, in the folder {path.parent}"
        elif isinstance(error, SystemExit):
            hint = 'put what the script runs under if __name__ == "__main__":'
        raise InputError(
            f"cannot import {module_name!r}: {type(error).__name__}: {first_line(error)}",
            hint=hint,
        ) from error
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise InputError(
            f"{module_name} has no callable {attribute!r}", hint=f"write package.module:{kind}"
        )
    return found


class _Initializing(TorchDispatchMode):
    """Answer questions about values that an initialization asks (`while mask.any()`): no, zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            kind = args[0].dtype
            return False if kind is torch.bool else 0.0 if kind.is_floating_point else 0
        return func(*args, **(kwargs or {}))


@contextmanager
def _building() -> Iterator[None]:
    """Build on fake tensors, so that nothing is allocated however large the model is."""
    with FakeTensorMode(allow_non_fake_inputs=True), _Initializing(), converted_in_place():
        yield
