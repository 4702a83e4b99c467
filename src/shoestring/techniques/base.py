"""The contract of a technique: one transformation in two worlds, prediction and training step.

A technique is a frozen dataclass that `register` knows by its name. `predict` says what it does to
a trace, `apply` does it to a model; all the rest of the system must know of it (its flags, its
text, what a planner may try, what it claims) it says itself, and most of that has a default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

import torch
from torch import nn

from ..errors import InputError
from ..trace.graph import Trace
from .claims import Circumstances, Claim

if TYPE_CHECKING:
    from .offers import Context, Offer, Scheduler, Update, Updates

Run = Callable[[Any], torch.Tensor]
LossUnits = str | Callable[[Any], float | torch.Tensor]
"""Units a loss is averaged over: "examples", or a function from a part of a batch to its units."""


class HasState(Protocol):
    """Something that outlives a step and belongs into a snapshot."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class Meaning:
    """How tensors of a transformed model compare with those of the plain one.

    A technique that stores something differently (at the nonzeros only, times a power of two) adds
    one to `Setup.meanings`.
    """

    def prepare_plain(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Change a plain copy so that its gradients compare; whether anything changed."""
        return False

    def expected(self, name: str, plain: torch.Tensor) -> torch.Tensor:
        """A tensor of plain training, as the transformed model holds it."""
        return plain

    def state(
        self, like: torch.Tensor, key: str, held: torch.Tensor, beside: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """An optimizer's state as it is meant; None for what plain training does not have.

        `like` has the parameter's shape and device, `beside` all state of it.
        """
        return held


class LossScaling(Protocol):
    """The factor of the loss before the backward pass."""

    scale: torch.Tensor
    found_inf: torch.Tensor
    """One where a gradient of this update overflowed: it is skipped on the device."""
    agree: Callable[[torch.Tensor], object]
    """Called with `found_inf`: ranks that hold different gradients skip together."""

    def look_for_overflow(self, gradients: list[torch.Tensor]) -> None:
        """Set `found_inf`, before an update."""
        ...

    def adjust(self) -> None:
        """Move the scale, after it."""
        ...


class Arrivals(Protocol):
    """Gradients that several ranks add up while the backward pass runs, each when it is final."""

    def begin(self) -> None:
        """A backward pass follows that leaves final gradients."""
        ...

    def watched(self, parameter: torch.Tensor) -> torch.Tensor:
        """The tensor whose hook says that the gradient of an optimizer's parameter is final."""
        ...

    def arrived(self, watched: torch.Tensor) -> Iterable[torch.Tensor]:
        """That of one is final on this rank: the parameters whose sums are there now."""
        ...

    def rest(self) -> Iterable[torch.Tensor]:
        """After the passes: the same for all that are left."""
        ...

    def norm(self, norms: Mapping[torch.Tensor, torch.Tensor], kind: float) -> torch.Tensor:
        """Of all gradients, from the norm of each that is here."""
        ...

    def anywhere(self, here: bool) -> bool:
        """Whether it holds on any rank."""
        ...


def total_norm(norms: list[torch.Tensor], kind: float) -> torch.Tensor:
    """Of all gradients from the norm of each, as `torch.nn.utils.get_total_norm` adds them up."""
    if not norms:
        return torch.tensor(0.0)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for norm in norms:
        groups.setdefault((norm.device, norm.dtype), []).append(norm)
    together = [norm.to(norms[0].device) for group in groups.values() for norm in group]
    return torch.linalg.vector_norm(torch.stack(together), kind)


class Sums(Protocol):
    """Gradients that wait elsewhere than in `.grad`."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        ...

    def forget(self) -> None:
        """No update will be made from them."""
        ...


@dataclass
class Setup:
    """A training step under construction: each technique changes the part that is its own.

    The step runs `run` on each part of `split(batch)`, multiplies the loss by the part's weight,
    calls `backward` on it; at the end every `before_update`, then `update` once, then every
    `after_update`.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    run: Run
    """batch → loss."""
    split: Callable[[Any], Iterable[tuple[Any, float | torch.Tensor]]]
    """batch → parts with their weights, which add up to one."""
    backward: Callable[[torch.Tensor], None]
    """Weighted loss of a part → gradients in `.grad`, added up."""
    update: Callable[[], None]
    """Gradients → parameters."""
    before_update: list[Callable[[], object]] = field(default_factory=list)
    """Called when the gradients of all parts are there, before they are clipped."""
    gradients_gone: str = ""
    """Why gradients do not wait for the update (the backward pass makes it); "" where they do."""
    clips: bool = False
    """Whoever updates in the backward pass clips there, as `clip` says."""
    clip: Any = None
    """The step's `Clip`: a norm, or a value, for each update; None for neither."""
    norm: torch.Tensor | None = None
    """Of the gradients of this update before they were clipped, where `clips` found it."""
    arrivals: Arrivals | None = None
    """On several ranks; None in one process."""
    part_begins: Callable[[bool], None] = lambda last: None
    """Called by whoever updates in the backward pass, before each part, and whether it is last."""
    after_update: list[Callable[[], object]] = field(default_factory=list)
    """Called after every update; True says that parameters or buffers were replaced."""
    state: dict[str, HasState] = field(default_factory=dict)
    meanings: list[Meaning] = field(default_factory=list)
    loss_scale: LossScaling | None = None
    sums: Sums | None = None
    """Gradients that a technique keeps elsewhere until the update; None where it keeps none."""
    accumulates: bool = False
    """The gradients of this batch wait for those of the next: no update follows."""
    adds_apart: bool = False
    """Gradients of parts are added up elsewhere than in `.grad`, in more tensors than those."""
    updates_in_backward: bool = False
    """Parameters are updated while the backward pass runs, and their gradients go."""
    updating: bool = False
    """The update of this step has begun. Fused kernels do not count as writing, so versions of
    tensors do not tell."""
    rounds_saved: bool = False
    """A technique rounds what is saved for backward, so that what is recomputed differs."""
    first_run_differs: bool = False
    """The first forward pass is looked at; what was found there changes those after it."""
    update_on_device: bool = False
    """The update reads nothing back to the host, whatever the optimizer does by itself."""
    update_streams: bool = False
    """Around the update tensors are brought and taken away: nobody may leave it out."""
    rates_on_device: Callable[[], bool] = lambda: False
    """Whether the update takes learning rates as tensors, so that a graph follows a schedule."""
    not_captured: str = ""
    """Why a technique keeps the step from being one CUDA graph; "" where none does."""
    before_graph: list[Callable[[], None]] = field(default_factory=list)
    """Called before a step is captured as a CUDA graph, and before each replay: copies of other
    streams are waited for."""
    in_capture: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)
    """Around a step while it is captured: other streams leave from its own, and join it again."""
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """The user's own, (model, batch) → loss; `run` is what the step makes of it."""
    wrapper: Any = None
    """The object that `update` calls, if it wraps the optimizer and has a step of its own, or the
    optimizer itself, if someone set another step on it."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Called in reverse order when a later technique fails: the model must be as it was."""

    def check_step(self, what: str) -> None:
        """Where a technique updates by itself, nobody may have put more around the step."""
        name = type(self.optimizer).__name__
        if self.wrapper is self.optimizer:
            raise InputError(
                f"{what} would leave out the step that was set on this {name}",
                hint="leave optimizer.step as it is, and do the rest in the training loop",
            )
        if self.wrapper is not None:
            raise InputError(
                f"{what} would leave out the step of {type(self.wrapper).__name__}",
                hint=f"give the {name} it holds",
            )


@dataclass(frozen=True)
class Flag:
    """A setting that the command line and studies know by a name of its own."""

    name: str
    """--name, and the key of a study's grid."""
    setting: str
    kind: type
    help: str
    neutral: Any = None
    """The value that changes nothing; None where the technique must be left out."""
    label: str | None = None
    """Its name in tables."""
    percent: bool = False
    part_of: str | None = None
    """The setting it is a part of: where both are equal the technique changes nothing."""
    explained: tuple[str, Any] | None = None
    """For `explain`, which tells what it does to a peak: in words, and the value that is tried."""


class Technique:
    """One way to need less memory; each is a frozen dataclass of its settings.

    Derive from it and override what differs: `predict` for a trace, `apply` for a real step,
    `claims` for a certificate, `offers` for the planner.

    Examples:
        >>> @ss.register
        ... @dataclass(frozen=True)
        ... class Mine(ss.Technique):
        ...     name = "mine"
    """

    name: ClassVar[str]
    """Under which it is registered: of its table in a plan's file, of its snapshots."""
    order: ClassVar[int] = 50
    """When it is applied: 10 what a tensor is, 20 its type, 30 what is recomputed, 40 the parts."""
    flags: ClassVar[tuple[Flag, ...]] = ()
    allow: ClassVar[str | None] = None
    """The name by which a planner is allowed its lossy settings, by default its own."""
    revisable: ClassVar[bool] = False
    """A step can take it away and put another on, between two updates."""
    addable: ClassVar[bool] = False
    """A step without it can get it, but not change it."""
    same_state: ClassVar[bool] = False
    """Weights and optimizer state lie as in plain training: another loop can go on with them."""
    changes_update: ClassVar[bool] = True
    """It changes resident bytes, or those of the update."""
    changes_passes: ClassVar[bool] = False
    """It changes what forward and backward hold by more than a factor: they are traced."""
    leaves_passes: ClassVar[bool] = False
    """Whether forward and backward run as they would without it."""
    some_tell_all: ClassVar[bool] = True
    """Its effect on an update is proportional to the tensors' bytes."""
    updates_apart: ClassVar[bool] = False
    """Its update takes tensor after tensor, also on CUDA, where optimizers take all together."""
    updates_on_device: ClassVar[bool] = False
    """Its update reads nothing back to the host, so that the step can be one CUDA graph."""
    runs_eagerly: ClassVar[bool] = False
    """With it a step on CUDA cannot be one graph."""
    state_first: ClassVar[bool] = False
    """The optimizer's state is there before the first pass, not made by the first update."""
    stores_weights: ClassVar[bool] = False
    """Weights have other names or shapes with it; `plain_weights` has them as the model had."""
    replaces_parameters: ClassVar[bool] = False
    """Parameters are other tensors with it, so that to try it out would take room for both."""
    updates_in_backward: ClassVar[bool] = False
    """A trace of the passes needs the optimizer that trains."""
    extrapolates: ClassVar[bool] = True
    """Its bytes at a few lengths tell those at others; `cards` tries no other techniques."""
    moves_elements: ClassVar[bool] = False
    """Between updates elements of a parameter, and of state of its shape, change their places."""
    rounds_saved: ClassVar[bool] = False
    """It rounds what is saved for backward at random: others that change what is saved are proven
    in the plan without it."""
    proof: ClassVar[Literal["without", "alone"] | None] = None
    """How a lossless one is proven beside lossy ones: the plan without it, or it alone."""
    suspects: ClassVar[Mapping[str, str]] = {}
    """For each thing compared, the usual reason why it differs with this technique."""

    def refuses(self, other: Technique) -> str | None:
        """Why it cannot be in one plan with another; None if it can."""
        return None

    @property
    def inside_blocks(self) -> bool:
        """Whether it works on modules, weights or functions inside of blocks, and must see them."""
        return False

    # -- settings and text ---------------------------------------------------------------------

    @property
    def is_neutral(self) -> bool:
        """Whether these settings change no bit."""
        return False

    def plain_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The state dict of a model it was applied to, with the names and shapes of before."""
        return model.state_dict()

    def short(self) -> str:
        """For a plan on one line: 'microbatch 10'."""
        values = ", ".join(str(value) for value in self.to_dict().values())
        return f"{self.name} {values}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain values by setting, defaults left out."""
        return {
            f.name: _plain(self.name, f.name, getattr(self, f.name))
            for f in fields(self)  # type: ignore[arg-type]
            if getattr(self, f.name) != f.default
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read what `to_dict` wrote; anything else is an error that names it."""
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        unknown = sorted(set(given) - known)
        if unknown:
            raise InputError(
                f"{cls.name} has no setting {unknown[0]!r}",
                hint="one of " + ", ".join(sorted(known)),
            )
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(f"{cls.name}: {error}", hint="see the technique's README") from None

    @classmethod
    def from_flags(cls, given: Mapping[str, Any], unit: str = "examples") -> Self | None:
        """The technique the flags ask for, or None; `unit` is what the model counts a batch in."""
        values = {f.setting: given[f.name] for f in cls.flags if given.get(f.name) is not None}
        return cls(**values) if values else None

    @classmethod
    def to_flags(cls, given: Mapping[str, Any], batch: Any = None) -> dict[str, Any]:
        """Settings as `to_dict` wrote them, as values of the flags."""
        return {flag.name: given.get(flag.setting, flag.neutral) for flag in cls.flags}

    @classmethod
    def told_by_flags(cls) -> frozenset[str]:
        """Settings that flags or the run itself decide."""
        return frozenset({"seed", *(flag.setting for flag in cls.flags)})

    def is_neutral_for(self, batch_size: int | None) -> bool:
        """Whether nothing changes in training with minibatches of this size."""
        return self.is_neutral

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Every setting that has one, with its default."""
        return {f.name: f.default for f in fields(cls) if f.default is not MISSING}  # type: ignore[arg-type]

    # -- prediction ----------------------------------------------------------------------------

    def prepare(self, batch: Any) -> Any:
        """The part of the batch that runs at once, for a prediction."""
        return batch

    def predict(self, trace: Trace) -> Trace:
        """The trace with the technique's sizes, types and schedule. Pure."""
        return trace

    def untraced_bytes(self, device: str, draws: bool = True) -> int:
        """Upper bound of its bytes on the device during a step that no trace shows.

        `draws` says whether the step draws random numbers.
        """
        return 0

    # -- training step -------------------------------------------------------------------------

    def check(self, setup: Setup) -> None:
        """Raise InputError, before anything is changed, if it cannot be applied."""

    def apply(self, setup: Setup) -> None:
        """Change the setup for real."""
        raise NotImplementedError

    def examples_at_once(self, batch: Any) -> int | None:
        """How many examples of this batch run at once; None leaves that to others."""
        return None

    @property
    def at_once(self) -> int | None:
        """How much of a minibatch runs at once, as its flag counts; None for all."""
        return None

    @property
    def tokens_at_once(self) -> int | None:
        """The same where tokens are counted."""
        return None

    def check_size(self, batch_size: int) -> None:
        """InputError if a minibatch of this size, as its flag counts, cannot be predicted."""

    def weighted(self, units: LossUnits) -> Self:
        """The same, where parts of a batch weigh by these units unless it says otherwise."""
        return self

    def counting(self, unit: str, each: int) -> Self:
        """The same, its size counted in another unit of which an example has `each`."""
        return self

    @property
    def scales_loss(self) -> bool:
        """Whether an update is skipped when any gradient overflowed."""
        return False

    @property
    def input_dtype(self) -> torch.dtype | None:
        """In which floating-point inputs are best given; None for any."""
        return None

    def examples_together(self, batch: Any) -> int | None:
        """How many examples must run on one rank: they are normalized together, or run at once."""
        return self.examples_at_once(batch)

    @property
    def loss_units(self) -> LossUnits | None:
        """Units a part's loss is averaged over, if the technique knows."""
        return None

    # -- several ranks -------------------------------------------------------------------------

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """Raise InputError if ranks cannot share a step with it; `kind` is "ddp" or "fsdp"."""

    def on_ranks(self, setup: Setup, kind: str) -> None:
        """Called after `apply` on several ranks: what they must agree on."""

    def gathered(self, model: nn.Module) -> list[tuple[str, ...]] | None:
        """Paths of the modules whose parameters are needed together; None for any."""
        return None

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters must stay gathered between forward and backward."""
        return False

    # -- planning ------------------------------------------------------------------------------

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """The settings a planner may try, from mild to harsh."""
        return ()

    @classmethod
    def offers_untraced(cls, context: Context) -> Iterable[Offer]:
        """Settings to run and measure where there is no trace, from mild to harsh; revisable."""
        return ()

    @classmethod
    def scheduler(cls, context: Context) -> Scheduler | None:
        """Of the technique that fills the room a plan leaves: finds its settings by bytes."""
        return None

    def folds_parts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Of one that updates in the backward pass: gradients of parts before the last go, too."""
        return False

    def estimate_update(self, updates: Updates) -> Update | None:
        """Bytes of the update, if that needs no trace."""
        return None

    def between(self) -> tuple[Self, Self, float] | None:
        """Two settings, and where on the line from the first to the second bytes and FLOPs lie."""
        return None

    def describe(self) -> tuple[str, str]:
        """Its settings and what they do, for a plan's table."""
        return self.short(), "changes nothing that is computed"

    # -- proof ---------------------------------------------------------------------------------

    def comparable(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within: the plain model runs as the planned one can be compared with."""
        return nullcontext()

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """Where planned training is not equal to plain training, how close it is, and why."""
        return ()


def _plain(technique: str, setting: str, value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(technique, setting, item) for item in value]
    if callable(value):
        raise InputError(
            f"{technique}.{setting} is a function and cannot be written to a file",
            hint="give it where the plan is applied",
        )
    return value
