"""The settings a plan may have beside its checkpointing, and how each changes a chain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..techniques import Checkpointing, Microbatching, Precision, Sparsity
from ..techniques.plan import Plan
from .allow import PRECISION_LOSS, Allowed, density_loss, microbatch_loss
from .result import LOSSLESS, LOSSY, NEAR
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
    units: str = "auto"
    """By which microbatches weigh."""

    @property
    def kind(self) -> str:
        """Lossless, near-lossless or lossy."""
        return LOSSLESS if not self.loss else NEAR if self.loss <= PRECISION_LOSS else LOSSY

    def plan(self, checkpointing: Checkpointing | None = None) -> Plan:
        """The plan with this setting."""
        return Plan(
            sparsity=None if self.density is None else Sparsity(self.density),
            precision=None if self.precision is None else Precision(self.precision),
            checkpointing=checkpointing,
            microbatching=None
            if self.microbatch is None
            else Microbatching(self.microbatch, units=self.units),
        )


def settings(
    allowed: Allowed,
    examples: int | None,
    *,
    batch_norm: bool,
    sparsifiable: bool,
    ragged: bool,
    narrow: str = "fp16",
    units: str = "auto",
    splits: bool = True,
) -> list[Setting]:
    """Every setting that is allowed, the least lossy first; `narrow` is the 16-bit type.

    `ragged`: the last microbatch may be smaller; never where BatchNorm would see it. `units` weigh
    microbatches; a loss that does not split has none.
    """
    sizes = [None, *_sizes(examples, ragged and not batch_norm)]
    if (batch_norm and not allowed.bn_microbatch) or not splits or allowed.exact:
        sizes = [None]
    densities = [None, *(DENSITIES if allowed.sparsity and sparsifiable else ())]
    found = []
    for precision in (None, narrow) if allowed.precision else (None,):
        for size in sizes:
            for density in densities:
                loss = PRECISION_LOSS if precision else 0.0
                if size is not None and batch_norm:
                    loss += microbatch_loss(size)
                if density is not None:
                    loss += density_loss(density)
                parts = 1 if size is None or examples is None else -(-examples // size)
                found.append(Setting(precision, size, density, parts, loss, units))
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


@dataclass(frozen=True)
class Scales:
    """How a setting changes the chain of the plain step."""

    activations: float = 1.0
    """Bytes, by the share of the minibatch that runs at once and the width of its numbers."""
    gradients: float = 1.0
    flops: float = 1.0
    bytes_moved: float = 1.0
    split: bool = False
    """Gradients of the microbatches before are there when one begins."""


def adapted(chain: Chain, by: Scales, resident_bytes: int, floor_bytes: int) -> Chain:
    """The chain of a setting; `resident_bytes` are what neither schedule nor passes change."""
    gradients = sum(stage.parameter_gradient_bytes for stage in chain.stages)
    return replace(
        chain,
        head=_adapted(chain.head, by),
        blocks=tuple(_adapted(stage, by) for stage in chain.blocks),
        tail=_adapted(chain.tail, by),
        fixed_bytes=resident_bytes + (int(gradients * by.gradients) if by.split else 0),
        floor_bytes=floor_bytes,
    )


def _adapted(stage: Stage, by: Scales) -> Stage:
    own = stage.parameter_gradient_bytes

    def made(nbytes: int) -> int:
        return int(nbytes * by.activations)

    def backward(nbytes: int) -> int:
        gradients = min(own, nbytes)
        return made(nbytes - gradients) + int(gradients * by.gradients)

    def option(of: Option) -> Option:
        return replace(
            of,
            kept_bytes=made(of.kept_bytes),
            forward_bytes=made(of.forward_bytes),
            backward_bytes=backward(of.backward_bytes),
            again_bytes=backward(of.again_bytes),
            forward=scaled(of.forward, by),
            again=scaled(of.again, by),
            backward=scaled(of.backward, by),
        )

    return replace(
        stage,
        options={name: option(of) for name, of in stage.options.items()},
        held_bytes=made(stage.held_bytes),
        pass_bytes=made(stage.pass_bytes),
        gradient_bytes=made(stage.gradient_bytes),
        parameter_gradient_bytes=0 if by.split else int(own * by.gradients),
    )


def scaled(work: Work, by: Scales) -> Work:
    """The same kernels, on fewer examples or narrower numbers."""
    return work.times(by.flops, by.bytes_moved)
