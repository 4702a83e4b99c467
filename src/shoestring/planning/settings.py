"""The settings a plan may have beside its checkpointing, and how each changes a chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..techniques import Checkpointing, Microbatching, Precision, Sparsity
from .allow import PRECISION_LOSS, Allowed, density_loss, microbatch_loss
from .plan import Plan
from .stages import Chain, Option, Stage, Work

DENSITIES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
_PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)


@dataclass(frozen=True)
class Setting:
    """Precision, microbatch and density; None leaves a technique out."""

    precision: str | None = None
    microbatch: int | None = None
    density: float | None = None
    parts: int = 1
    """Microbatches in a minibatch."""
    loss: float = 0.0
    """How lossy it is taken to be (`planning.allow`); the least lossy that fits is chosen."""

    def plan(self, checkpointing: Checkpointing | None = None) -> Plan:
        """The plan with this setting."""
        return Plan(
            sparsity=None if self.density is None else Sparsity(self.density),
            precision=None if self.precision is None else Precision(self.precision),
            checkpointing=checkpointing,
            microbatching=None if self.microbatch is None else Microbatching(self.microbatch),
        )


def settings(
    allowed: Allowed, examples: int | None, batch_norm: bool, sparsifiable: bool, ragged: bool
) -> list[Setting]:
    """Every setting that is allowed, the least lossy first.

    `ragged`: the last microbatch may be smaller; never where BatchNorm would see it.
    """
    sizes = [None, *_sizes(examples, ragged and not batch_norm)]
    if batch_norm and not allowed.bn_microbatch:
        sizes = [None]
    densities = [None, *(DENSITIES if allowed.sparsity and sparsifiable else ())]
    found = []
    for precision in (None, "fp16") if allowed.precision else (None,):
        for size in sizes:
            for density in densities:
                loss = PRECISION_LOSS if precision else 0.0
                if size is not None and batch_norm:
                    loss += microbatch_loss(size)
                if density is not None:
                    loss += density_loss(density)
                parts = 1 if size is None or examples is None else -(-examples // size)
                found.append(Setting(precision, size, density, parts, loss))
    return sorted(found, key=lambda s: s.loss)


def _sizes(examples: int | None, ragged: bool) -> Iterator[int]:
    """Microbatches worth trying, from large to small; those of equal parts alone if not ragged."""
    if examples is None:
        return
    counts = {n for n in _PARTS if n <= examples} | {examples}
    if not ragged:
        counts = {n for n in range(2, examples + 1) if examples % n == 0}
    seen = {examples}
    for count in sorted(counts):
        size = -(-examples // count)
        if size not in seen:
            seen.add(size)
            yield size


def adapted(chain: Chain, scale: float, resident_bytes: int, floor_bytes: int) -> Chain:
    """The chain of a microbatch: a fraction of the activations, and gradients that are there.

    `resident_bytes` are what does not depend on the schedule. A chain that is not split (scale 1)
    makes its gradients as backward goes; the microbatches of a split one add to those of the first.
    """
    split = scale < 1
    gradients = sum(stage.parameter_gradient_bytes for stage in chain.stages)
    return replace(
        chain,
        head=_adapted(chain.head, scale, split),
        blocks=tuple(_adapted(stage, scale, split) for stage in chain.blocks),
        tail=_adapted(chain.tail, scale, split),
        fixed_bytes=resident_bytes + (gradients if split else 0),
        floor_bytes=floor_bytes,
    )


def _adapted(stage: Stage, scale: float, split: bool) -> Stage:
    own = stage.parameter_gradient_bytes

    def activations(nbytes: int, gradients: int = 0) -> int:
        return int((nbytes - gradients) * scale) + gradients

    def option(of: Option) -> Option:
        return replace(
            of,
            kept_bytes=activations(of.kept_bytes),
            forward_bytes=activations(of.forward_bytes),
            backward_bytes=activations(of.backward_bytes, min(own, of.backward_bytes)),
            again_bytes=activations(of.again_bytes, min(own, of.again_bytes)),
            forward=scaled(of.forward, scale),
            again=scaled(of.again, scale),
            backward=scaled(of.backward, scale),
        )

    return replace(
        stage,
        options={name: option(of) for name, of in stage.options.items()},
        held_bytes=activations(stage.held_bytes),
        pass_bytes=activations(stage.pass_bytes),
        gradient_bytes=activations(stage.gradient_bytes),
        parameter_gradient_bytes=0 if split else own,
    )


def scaled(work: Work, scale: float) -> Work:
    """The same kernels on fewer examples."""
    return Work(work.flops * scale, work.bytes_moved * scale, work.launches)
