"""A step on several ranks: each runs its share of the minibatch, gradients are added once.

Every rank holds the model and runs its own microbatches. After the last one the gradients are
added over the ranks, each exactly once a step, and every rank makes the same update; so weights,
loss scale and sparse pattern stay equal without being sent. `sharding.py` splits the model too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import InputError
from ..memory.live.measure import Measurement
from ..memory.sharded import BUCKET_BYTES
from ..techniques.base import Setup, Technique
from ..techniques.plan import Plan
from ..techniques.splitting.find import tested_units
from ..trace.blocks import is_normalization
from ..trace.graph import Phase
from ..trace.tracing import Loss
from .arriving import InOrder, check_gradient
from .clipping import Clip, clip_gradients
from .group import ShardingName, communication_device, ranks
from .setting_up import prepare, transform
from .shares import Parallel, Shares
from .step import Step

if TYPE_CHECKING:
    from .sharding import Sharding


class Reduction:
    """Adds the gradients of some parameters over the ranks, each of them once."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._used: list[bool] | None = None

    @torch.no_grad()
    def __call__(self) -> None:
        """The sums, in place; to be called when the last microbatch has run."""
        if self._used is None:
            self._used = self._agreed()
        gradients = []
        for parameter, used in zip(self._parameters, self._used, strict=True):
            if parameter.grad is None and used:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                check_gradient(parameter.grad, used)
                gradients.append(parameter.grad)
        add_over_ranks(gradients)

    def _agreed(self) -> list[bool]:
        """Which parameters have a gradient on any rank, asked once: at the first step."""
        own = [parameter.grad is not None for parameter in self._parameters]
        flags = torch.tensor(own, dtype=torch.int32, device=communication_device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]


def add_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    """The sum over the ranks, in place: large tensors as they are, small ones packed by type."""
    packs: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= BUCKET_BYTES and tensor.is_contiguous():
            dist.all_reduce(tensor)
            continue
        pack = packs.setdefault(tensor.dtype, [])
        pack.append(tensor)
        if sum(t.nbytes for t in pack) >= BUCKET_BYTES:
            _add_packed(packs.pop(tensor.dtype))
    for pack in packs.values():
        _add_packed(pack)


def _add_packed(pack: list[torch.Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in pack])
    dist.all_reduce(flat)
    for tensor, part in zip(pack, flat.split([t.numel() for t in pack]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@torch.no_grad()
def average_statistics(model: nn.Module) -> None:
    """BatchNorm's running statistics become their mean over the ranks; alone, they are that.

    Each rank tracks the microbatches it ran. A running average is linear, so it does not matter
    for later ones when, or how often, the mean is taken.
    """
    if ranks() == 1:
        return
    running = [
        buffer
        for module in model.modules()
        if is_normalization(module)
        for buffer in module.buffers(recurse=False)
        if buffer.is_floating_point()
    ]
    add_over_ranks(running)
    for buffer in running:
        buffer.div_(ranks())


def own_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, of those that are split this rank's part."""
    held: list[Any] = [*model.parameters(), *model.buffers()]
    return [t.to_local() if hasattr(t, "to_local") else t for t in held]


class Ranks:
    """Makes a setup one of several ranks; applied after what changes tensors, before microbatches.

    There the gradients of all microbatches are complete, and no update has seen them.
    """

    order = 40

    def __init__(self, parallel: Parallel, plan: Plan) -> None:
        self._parallel, self._plan = parallel, plan
        self._sharding: Sharding | None = None

    def check(self, setup: Setup) -> None:
        """A bare model on one device, and for `fsdp` a plan that can be split."""
        if isinstance(setup.model, DistributedDataParallel):
            raise InputError(
                "the model is wrapped in DistributedDataParallel",
                hint="give the bare model; parallel= adds the gradients itself",
            )
        for technique in self._plan.techniques:
            technique.check_ranks(setup, self._parallel.kind)
        if self._parallel.kind == "fsdp":
            from .sharding import check_sharding  # half a second to import, for those who use it

            check_sharding(setup, self._plan)

    def apply(self, setup: Setup) -> None:
        """Start from rank 0's tensors; share every batch, add gradients before the update."""
        for tensor in (*setup.model.parameters(), *setup.model.buffers()):
            sent = tensor.detach().contiguous()  # a copy of one that is not, channels last
            dist.broadcast(sent, 0)
            tensor.data.copy_(sent)
        setup.split = Shares(self._parallel, self._plan, partial(tested_units, setup))
        if self._parallel.kind == "fsdp":
            from .sharding import Sharding

            self._sharding = Sharding(setup, self._plan)
        for technique in self._plan.techniques:
            technique.on_ranks(setup, self._parallel.kind)
        whole = self._sharding
        held = list(setup.model.parameters()) if whole is None else whole.replicated
        reduce, arrivals = Reduction(held), InOrder(held)
        setup.arrivals = arrivals if whole is None else whole.arrivals(arrivals)

        def complete() -> None:
            if setup.updates_in_backward:
                for _ in arrivals.rest():
                    pass
            else:
                reduce()

        setup.before_update.append(complete)
        if whole is not None:
            setup.before_update.append(whole.hand_over)

    def step(self, setup: Setup, clip: Clip | None = None) -> ParallelStep:
        """The step, once every technique has been applied."""
        return ParallelStep(setup, self._plan, self._sharding, clip)


class ParallelStep(Step):
    """A step that several ranks make together: all of them must call each of its methods."""

    def __init__(
        self, setup: Setup, plan: Plan, sharding: Sharding | None, clip: Clip | None = None
    ) -> None:
        super().__init__(setup, plan, clip)
        self._graph = None  # the collectives in a step are not captured
        self._sharding = sharding
        if sharding is not None and setup.updates_in_backward:
            setup.part_begins = setup.model.set_requires_gradient_sync  # type: ignore[assignment]
        elif sharding is not None:
            setup.split = sharding.announced(setup.split)

    def _compute(
        self,
        batch: Any,
        entering: Callable[[Phase], None] = lambda phase: None,
        update: bool = True,
    ) -> torch.Tensor:
        loss = super()._compute(batch, entering, update)
        dist.all_reduce(loss)
        return loss

    @property
    def measurable(self) -> bool:
        """Not `fsdp` on the CPU: it frees parameters in ways that a count of storages misses."""
        device = next(self.model.parameters()).device.type
        return self._sharding is None or device == "cuda"

    def measure(self, batch: Any, *, update: bool = True) -> Measurement:
        """Run one step and return the peak of this rank."""
        if not self.measurable:
            raise InputError(
                "what fsdp takes on the CPU cannot be measured", hint="measure it on CUDA"
            )
        return super().measure(batch, update=update)

    def _clip_gradients(self, clip: Clip) -> torch.Tensor | None:
        if self._sharding is None:
            return super()._clip_gradients(clip)
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        whole = self._sharding
        return clip_gradients(clip, held, self.loss_scale, whole.combined_norm, whole.counted())

    def state_dict(self) -> dict[str, Any]:
        """Everything that outlives a step, whole: any number of ranks can go on from it.

        Under `fsdp` rank 0 gets it, on the host, and the others an empty dict.
        """
        average_statistics(self.model)
        if self._sharding is None:
            return super().state_dict()
        own = {name: item.state_dict() for name, item in self._setup.state.items()}
        return self._sharding.state_dict(own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of any number of ranks; every rank is given all of it."""
        if self._sharding is not None:
            state = self._sharding.own_part(state)
        super().load_state_dict(state)


def apply_on_ranks(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: Loss,
    parallel: Parallel,
    clip: float | Clip | None = None,
) -> ParallelStep:
    """One step of all ranks; see `apply`."""
    clip = Clip.of(clip)
    chosen, setup = prepare(plan, model, optimizer, loss=loss)
    ranks_ = Ranks(parallel, chosen)
    # Techniques that cut the batch come last: ranks add the sums over all their parts.
    whole = [t for t in chosen.techniques if t.order < Ranks.order]
    transform(setup, [*whole, ranks_, *(t for t in chosen.techniques if t.order >= Ranks.order)])
    return ranks_.step(setup, clip)


def parallel_of(given: ShardingName | Parallel | None) -> Parallel | None:
    """The `parallel` option; None for a single process."""
    if given is None:
        return None
    chosen = given if isinstance(given, Parallel) else Parallel(given)
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            f"parallel={chosen.kind!r} needs a process group",
            hint="start with torchrun, and call torch.distributed.init_process_group() first",
        )
    return chosen if ranks() > 1 else None
