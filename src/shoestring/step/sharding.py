"""FSDP2 under a plan: parameters, gradients and optimizer state split over the ranks.

`fully_shard` gathers the parameters of a block just before it runs and reduces its gradients
after. The optimizer, ours or the user's, sees each rank's own rows as ordinary tensors, so every
elementwise update works on them unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ..errors import InputError
from ..techniques.base import Setup, total_norm
from ..techniques.optimizers import ELEMENTWISE
from ..techniques.plan import Plan
from ..trace.blocks import block_paths, is_normalization
from .arriving import InOrder

Split = Callable[[Any], Any]


def check_sharding(setup: Setup, plan: Plan) -> None:
    """Raise InputError for what cannot be split over the ranks."""
    kind = type(setup.optimizer)
    if kind not in ELEMENTWISE:
        raise InputError(
            f"fsdp cannot split the state of {kind.__name__}",
            hint="SGD, Adam and other elementwise optimizers can; or parallel='ddp'",
        )
    if setup.optimizer.state:
        raise InputError(
            "the optimizer has state from before, which fsdp does not split",
            hint="apply before the first step, then load_state_dict",
        )
    for name, parameter in setup.model.named_parameters():
        if parameter.dim() == 0:
            raise InputError(
                f"fsdp cannot split {name}, a single number",
                hint=f"make {name} a tensor of one element, or parallel='ddp'",
            )
    owner: dict[nn.Parameter, tuple[str, ...]] = {}
    units = gathered_units(setup.model, plan)
    for path, module in setup.model.named_modules(remove_duplicate=False):
        unit = next((u for u in units if any(_within(path, p) for p in u)), _OUTSIDE)
        for parameter in module.parameters(recurse=False):
            held = owner.setdefault(parameter, unit)
            if held != unit:
                named = [u[0] for u in (unit, held)]
                raise InputError(
                    f"{named[0]} shares a parameter with {named[1]}",
                    hint="parallel='ddp' takes shared parameters",
                )


_OUTSIDE = ("a module outside of the blocks",)


def _within(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.")


def gathered_units(model: nn.Module, plan: Plan) -> list[tuple[str, ...]]:
    """The blocks that are gathered together: those that are recomputed together."""
    found = (technique.gathered(model) for technique in plan.techniques)
    alone: list[tuple[str, ...]] = [(path,) for path in block_paths(model)]
    return next((units for units in found if units is not None), alone)


@dataclass(frozen=True)
class Shard:
    """One parameter: split over the ranks, and this rank's rows as the optimizer holds them."""

    split: DTensor
    own: nn.Parameter

    def hand_over(self) -> None:
        """The reduced gradient, if there is one, to where the optimizer looks for it."""
        self.own.data = self.split.to_local().detach()
        gradient: Any = self.split.grad
        if gradient is not None:
            self.own.grad = gradient.to_local()
            self.split.grad = None

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of every rank, put together."""
        return self.like(rows).full_tensor()

    def like(self, rows: torch.Tensor) -> DTensor:
        """Rows of this rank, as a part of what is split as the parameter is."""
        return DTensor.from_local(
            rows,
            self.split.device_mesh,
            self.split.placements,
            run_check=False,
            shape=self.split.shape,
            stride=self.split.stride(),
        )

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor."""
        parts = whole.chunk(dist.get_world_size())
        rank = dist.get_rank()
        return parts[rank] if rank < len(parts) else whole[:0]


class ShardArrivals:
    """FSDP has reduced a gradient when the hook of the split parameter runs."""

    def __init__(self, by_own: dict[nn.Parameter, Shard], whole: InOrder) -> None:
        self._by_own, self._whole = by_own, whole
        self._by_split = {shard.split: shard for shard in by_own.values()}
        self.begin, self.anywhere = whole.begin, whole.anywhere

    def watched(self, parameter: Any) -> torch.Tensor:
        """The split one."""
        shard = self._by_own.get(parameter)
        return parameter if shard is None else shard.split

    def arrived(self, watched: Any) -> Iterator[torch.Tensor]:
        """This rank's rows."""
        shard = self._by_split.get(watched)
        if shard is None:
            yield from self._whole.arrived(watched)
        else:
            shard.hand_over()
            yield shard.own

    def rest(self) -> Iterator[torch.Tensor]:
        """Those that nothing watches, too."""
        yield from self._whole.rest()
        for shard in self._by_own.values():
            if shard.split.grad is not None:
                shard.hand_over()
                yield shard.own

    def norm(self, norms: Mapping[torch.Tensor, torch.Tensor], kind: float) -> torch.Tensor:
        """Over all ranks; what every rank holds whole counts on the first."""
        first = dist.get_rank() == 0
        counted = [norm for p, norm in norms.items() if first or p in self._by_own]
        device = next(iter(norms.values())).device if norms else None
        own = total_norm(counted, kind).to(device)
        return Sharding.combined_norm(own, kind)


class Sharding:
    """Splits a setup's model and optimizer, and puts them together for a snapshot."""

    def __init__(self, setup: Setup, plan: Plan) -> None:
        self._model, self._optimizer = setup.model, setup.optimizer
        self._meanings = setup.meanings
        device = next(setup.model.parameters()).device.type
        before = dict(setup.model.named_parameters())
        for parameter in before.values():  # rows are split; channels last would not lie in rows
            parameter.data = parameter.data.contiguous()
        self.replicated = _odd_types(setup.model)
        """BatchNorm's FP32 parameters beside 16 bits: too few to split, reduced as in `ddp`."""
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(device, (dist.get_world_size(),)),
            "ignored_params": set(self.replicated),
        }
        keep = any(technique.keeps_gathered for technique in plan.techniques)
        for unit in gathered_units(setup.model, plan):
            modules = [setup.model.get_submodule(path) for path in unit]
            fully_shard(modules, reshard_after_forward=not keep, **settings)
        fully_shard(setup.model, **settings)
        for module in setup.model.modules():
            if isinstance(module, FSDPModule):  # the weights of the parts add up to one already
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        after = dict(setup.model.named_parameters())
        self._by_own: dict[nn.Parameter, Shard] = {}
        places: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in before.items():
            split = after[name]
            if isinstance(split, DTensor):
                own = nn.Parameter(split.to_local().detach(), split.requires_grad)
                own.whole_elements = split.numel()  # type: ignore[attr-defined]
                self._by_own[own] = Shard(split, own)
                places[parameter] = own
        for group in setup.optimizer.param_groups:
            group["params"] = [places.get(p, p) for p in group["params"]]
        if setup.loss_scale is not None:
            setup.loss_scale.agree = lambda found: dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def announced(self, split: Split) -> Split:
        """The same parts; gradients are reduced in the backward pass of the last one only."""
        root: Any = self._model

        def parts(batch: Any) -> Iterator[Any]:
            given = iter(split(batch))
            part = next(given, None)
            while part is not None:
                following = next(given, None)
                root.set_requires_gradient_sync(following is None)
                yield part
                part = following

        return parts

    def hand_over(self) -> None:
        """Gradients to where the optimizer looks for them."""
        for shard in self._by_own.values():
            shard.hand_over()

    def arrivals(self, whole: InOrder) -> ShardArrivals:
        """Gradients that are reduced while the backward pass runs; whole ones apart."""
        return ShardArrivals(self._by_own, whole)

    def counted(self) -> list[torch.Tensor]:
        """Parameters whose gradients belong to this rank's part of a norm: whole ones to rank 0."""
        whole = set(self.replicated) if dist.get_rank() else set()
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in held if p not in whole]

    @staticmethod
    def combined_norm(own: torch.Tensor, kind: float) -> torch.Tensor:
        """The norm over all ranks, of the norms of each."""
        largest = math.isinf(kind)
        whole = own.detach().clone() if largest else own.detach() ** kind
        dist.all_reduce(whole, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return whole if largest else whole ** (1 / kind)

    @torch.no_grad()
    def state_dict(self, techniques: dict[str, Any]) -> dict[str, Any]:
        """Model and optimizer as one process has them, on the host of rank 0; elsewhere empty."""
        first = dist.get_rank() == 0
        model: dict[str, Any] = {}
        for name, value in self._model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if first:
                model[name] = whole.cpu()
            del whole
        optimizer = self._whole_optimizer(first)
        if not first:
            return {}
        return {"model": model, "optimizer": optimizer, "techniques": techniques}

    def _meant(self, like: torch.Tensor, entries: dict[str, Any]) -> dict[str, Any]:
        """State of one parameter as plain training has it: rows of one rank lie otherwise coded."""
        made: dict[str, Any] = {}
        for key, value in entries.items():
            found = value
            for meaning in self._meanings if isinstance(value, torch.Tensor) else ():
                found = None if found is None else meaning.state(like, key, found, entries)
            if found is not None or value is None:
                made[key] = found
        return made

    def _whole_optimizer(self, first: bool) -> dict[str, Any]:
        held = self._optimizer.state_dict()
        groups = self._optimizer.param_groups
        held["param_groups"] = held["param_groups"][: len(groups)]  # without marks of coded state
        parameters = [p for group in groups for p in group["params"]]
        held["state"] = {
            index: self._meant(parameters[index], state) for index, state in held["state"].items()
        }
        # A rank without rows of a parameter may have no state of it, but must join in.
        kinds: list[Any] = [
            {
                (index, key): value.dtype
                for index, state in held["state"].items()
                for key, value in state.items()
                if isinstance(value, torch.Tensor) and value.dim() > 0
            }
        ]
        dist.broadcast_object_list(kinds, 0)
        for (index, key), dtype in kinds[0].items():
            shard = self._by_own.get(parameters[index])
            if shard is None:
                continue
            rows = held["state"].get(index, {}).get(key)
            if rows is None:
                rows = torch.zeros_like(shard.own, dtype=dtype)
            whole = shard.whole(rows.to(shard.own.device))
            if first:
                held["state"][index] = {**held["state"][index], key: whole.cpu()}
            del whole
        return held

    def own_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """A whole state as this rank's part of it."""
        names = dict(self._model.named_parameters(remove_duplicate=False))
        by_split = {shard.split: shard for shard in self._by_own.values()}
        model = {}
        for name, value in state["model"].items():
            shard = by_split.get(names.get(name))  # type: ignore[call-overload]
            model[name] = value if shard is None else shard.like(self._rows(shard, value))
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        moments = {}
        for index, held in state["optimizer"]["state"].items():
            shard = self._by_own.get(parameters[index])
            if shard is None:
                moments[index] = held
                continue
            whole = self._meant(torch.empty(()).expand(shard.split.shape), held)
            moments[index] = {
                key: shard.rows(value)
                if isinstance(value, torch.Tensor) and value.shape == shard.split.shape
                else value
                for key, value in whole.items()
            }
        return {**state, "model": model, "optimizer": {**state["optimizer"], "state": moments}}

    def _rows(self, shard: Shard, value: torch.Tensor) -> torch.Tensor:
        if value.shape != shard.split.shape:
            raise InputError(
                f"the state has a parameter of {tuple(value.shape)}, "
                f"the model one of {tuple(shard.split.shape)}",
                hint="load the state of the same model and plan",
            )
        return shard.rows(value).to(shard.own.device)


def _odd_types(model: nn.Module) -> list[nn.Parameter]:
    """BatchNorm's parameters where they are not of the type of the others."""
    norms = {p for m in model.modules() if is_normalization(m) for p in m.parameters(recurse=False)}
    types = {p.dtype for p in model.parameters() if p not in norms}
    return [p for p in model.parameters() if p in norms and {p.dtype} != types]
