"""The chain of the plain step, as the other techniques of a plan change it."""

from __future__ import annotations

from dataclasses import replace

from ...memory.work import Work
from ..offers import Conditions, Scales
from .stages import Chain, Option, Stage


def adapted(chain: Chain, at: Conditions) -> Chain:
    """The chain of a setting: bytes and work of one part of the minibatch."""
    gradients = sum(stage.parameter_gradient_bytes for stage in chain.stages)
    made = replace(
        chain,
        head=_adapted(chain.head, at),
        blocks=tuple(_adapted(stage, at) for stage in chain.blocks),
        tail=_adapted(chain.tail, at),
        fixed_bytes=at.resident_bytes + (int(gradients * at.gradients) if at.adds else 0),
        floor_bytes=at.floor_bytes,
    )
    return made if at.scales.inputs_here is None else _inputs_away(made, at.scales.inputs_here)


def _inputs_away(chain: Chain, here: int) -> Chain:
    """Inputs of regions take nothing but for some; so no region needs more than one block."""
    largest = max((stage.held_bytes for stage in chain.blocks), default=0)
    return replace(
        chain,
        blocks=tuple(replace(stage, held_bytes=0, joins=False) for stage in chain.blocks),
        fixed_bytes=chain.fixed_bytes + here * largest,
    )


def _adapted(stage: Stage, at: Conditions) -> Stage:
    own, by = stage.parameter_gradient_bytes, at.scales

    def made(nbytes: int) -> int:
        return int(nbytes * by.share * by.width)

    def backward(nbytes: int) -> int:
        gradients = min(own, nbytes)
        return made(nbytes - gradients) + int(gradients * at.gradients)

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
        freed_bytes=made(stage.freed_bytes),
        parameter_gradient_bytes=0 if at.adds else int(own * at.gradients),
    )


def scaled(work: Work, by: Scales) -> Work:
    """The same kernels, on fewer examples or narrower numbers."""
    return work.times(1 / by.parts, by.width / by.parts)
