"""Model + batch + plan → Chain: what each block needs and costs when kept, cheap or recomputed.

The planned step runs on fake tensors, first with every block kept, then with one block of each kind
cheap, one lean and one as a region of its own. Hooks say when a block begins forward and
backward, and the `device` accounting says what is live between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import InputError
from ...memory.items import LEAVES, Item
from ...memory.nodes import is_wide
from ...trace.blocks import block_levels
from ...trace.fakes import OptimizerLike
from ...trace.graph import Phase, Trace
from ..base import Technique
from ..offers import TraceStep
from ..plan import Plan
from .staged import BlockWatch, StagedRun
from .stages import Chain, Option, Stage

_HEAD = 0.02
"""Of all that is kept, so much must be before the first block for its modules to be stages."""
_JOINED = 0.75
"""Of the blocks, so many must be read by the next one only, or larger ones are tried."""


def estimate_chain(
    trace_step: TraceStep,
    model: nn.Module,
    of: Callable[[Sequence[Item], tuple[str, ...]], Technique],
    *,
    plan: Plan | None = None,
    optimizer: OptimizerLike = None,
    blocks: Sequence[str] = (),
    seen: Callable[[Trace], None] | None = None,
    plain: Chain | None = None,
) -> Chain:
    """The chain of blocks of the step that a plan makes, its own checkpointing left out.

    `of(items, paths)` is the technique that does this with the blocks. `blocks` names the modules;
    by default they are found, as small as they still hand their output to one another; where much
    is kept before the first of them, modules there are stages as well. Those that do not run
    exactly once belong to what is around them. Names of the stages are paths of the blocks, in the
    order they run. `seen` is given the trace of the step that keeps everything. `plain` is the
    chain of the same model without the plan: its blocks are taken to differ from those of the plan
    by as much in every way as when everything is kept, which saves all traces but one.
    """
    given = plan or Plan()
    levels = [tuple(blocks)] if blocks else block_levels(model)[::-1]
    if plain is not None:
        levels = [tuple(stage.name for stage in plain.blocks)]

    def run(items: tuple[Item, ...], paths: tuple[str, ...], optimizer: OptimizerLike) -> StagedRun:
        wrapped = given.but(of(items, paths)) if paths else given
        watch = BlockWatch(paths)
        trace = trace_step(wrapped, optimizer=optimizer, watch=watch.follow)
        return StagedRun(trace, watch)

    for paths in levels:  # the smallest blocks first
        kept = run(("keep",) * len(paths), paths, optimizer)
        ran = kept.watch.once()
        if ran != paths and ran:
            kept = run(("keep",) * len(ran), ran, optimizer)
        if ran and sum(map(kept.joins, range(len(ran)))) >= _JOINED * (len(ran) - 1):
            break
    if seen is not None:
        seen(kept.trace)
    if not ran:
        raise InputError(
            "no repeated blocks were found in the model",
            hint="name them, blocks=('stage1', 'stage2')",
        )
    if plain is not None and ran == levels[0]:
        return _shifted(plain, kept)
    first = () if blocks else _before(model, ran)
    if first and kept.kept[0] - kept.watch.gradient_bytes.get(-1, 0) > _HEAD * sum(kept.kept):
        # The modules before the blocks keep much: they become stages, too.
        longer = run(("keep",) * (len(first) + len(ran)), (*first, *ran), optimizer)
        order = longer.watch.once()
        first = tuple(p for p in order[: order.index(ran[0])] if p in first)
        if first:
            ran = (*first, *ran)
            same = longer.watch.paths == ran == order
            kept = longer if same else run(("keep",) * len(ran), ran, optimizer)
    lighter: tuple[str, ...] = LEAVES[1:] if any(map(is_wide, kept.trace.ops)) else ("cheap",)
    classes = _classes(model, ran)
    rounds, shown_by = _rounds(kept, classes, lighter)
    try:  # what the update takes is known by now
        others = [run(items, ran, "sgd-plain") for items in rounds]
    except InputError:  # a block that changes in place what it has read
        lighter = ()
        rounds, shown_by = _rounds(kept, classes, lighter)
        others = [run(items, ran, "sgd-plain") for items in rounds]

    def found(stage: int, item: Item) -> _Block:
        number, at = shown_by[stage, item]
        return _Block(others[number], at)

    # A region holds all it was given, so what the head hands to every block may be there longer.
    held = max(0, *(other.kept[0] - kept.kept[0] for other in others))
    fixed_bytes = kept.fixed_bytes + held
    blocks_ = [
        _stage(
            path,
            _Block(kept, i),
            _Block(kept, shown_by[i, ("keep",)][1]),
            {o: found(i, o) for o in lighter},
            found(i, ("keep",)),
        )
        for i, path in enumerate(ran, start=1)
    ]
    head, tail = (
        Stage("", {"keep": _option(_Block(kept, i), None)},
              parameter_gradient_bytes=kept.gradients[i], joins=False)
        for i in (0, len(ran) + 1)
    )  # fmt: skip
    return Chain(head, tuple(blocks_), tail, fixed_bytes, kept.update_peak_bytes)


def _shifted(plain: Chain, kept: StagedRun) -> Chain:
    """The chain of a step that differs from the plain one as this run does."""
    stages = [
        replace(
            stage,
            options=_shifted_options(stage.options, _option(_Block(kept, i), None)),
            parameter_gradient_bytes=kept.gradients[i],
        )
        for i, stage in enumerate(plain.stages)
    ]
    return Chain(
        stages[0], tuple(stages[1:-1]), stages[-1],
        kept.fixed_bytes, kept.update_peak_bytes,
    )  # fmt: skip


def _shifted_options(options: Mapping[str, Option], now: Option) -> dict[str, Option]:
    """Of a block that differs by as much in every way as when it is kept."""
    was = options["keep"]
    backward = now.backward_bytes - was.backward_bytes
    return {
        name: replace(
            option,
            kept_bytes=max(option.kept_bytes + now.kept_bytes - was.kept_bytes, 0),
            forward_bytes=max(option.forward_bytes + now.forward_bytes - was.forward_bytes, 0),
            backward_bytes=max(option.backward_bytes + backward, 0),
            again_bytes=max(option.again_bytes + backward, 0),
            forward=option.forward + now.forward - was.forward,
            backward=option.backward + now.backward - was.backward,
        )
        for name, option in options.items()
    }


def _before(model: nn.Module, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """The outermost modules that neither hold a block nor are one, or part of one."""
    around = {path[: at.start()] for path in blocks for at in re.finditer(r"\.|$", path)} | {""}
    return tuple(
        path
        for path, _ in model.named_modules()
        if path not in around and path.rpartition(".")[0] in around - set(blocks)
    )


ShownBy = dict[tuple[int, Item], tuple[int, int]]
"""Stage and item → the round and the stage in it that shows how it behaves."""


def _rounds(
    kept: StagedRun, classes: list[str], lighter: tuple[str, ...]
) -> tuple[list[tuple[Item, ...]], ShownBy]:
    """Schedules for further traces, so that each kind of block is seen in every way."""
    rounds: list[dict[int, Item]] = []
    shown_by: ShownBy = {}
    ways: tuple[Item, ...] = (*lighter, ("keep",))
    for typical, members in _kinds(kept, classes, len(ways)):
        for way, item in enumerate(ways):
            number, place = divmod(way, len(typical))
            while len(rounds) <= number:
                rounds.append({})
            shown = typical[-1] if item == ("keep",) and place else typical[place]
            rounds[number][shown] = item
            for i in members:
                shown_by[i, item] = number, shown
    items = [tuple(r.get(i, "keep") for i in range(1, len(classes) + 1)) for r in rounds]
    return items, shown_by


def _kinds(kept: StagedRun, classes: list[str], ways: int) -> list[tuple[list[int], list[int]]]:
    """Blocks of a class that do not differ when all are kept, and those that count as their kind.

    The first and the last of many may differ from the others in what head and tail need of them.
    """
    alike: dict[Any, list[int]] = defaultdict(list)
    for i, name in enumerate(classes, start=1):
        alike[name, kept.gradients[i], _option(_Block(kept, i), None)].append(i)
    kinds: dict[Any, list[list[int]]] = defaultdict(list)
    for (name, gradients, option), members in alike.items():
        kinds[name, gradients, option.forward, option.backward].append(members)
    made: list[tuple[list[int], list[int]]] = []
    for groups in kinds.values():
        typical = max(groups, key=len)
        if len(typical) >= ways:
            made.append((typical, [i for members in groups for i in members]))
        else:
            made += [(members, members) for members in groups]
    return made


def _classes(model: nn.Module, paths: tuple[str, ...]) -> list[str]:
    return [type(model.get_submodule(path)).__name__ for path in paths]


@dataclass(frozen=True)
class _Block:
    """One stage of one run."""

    run: StagedRun
    at: int


def _stage(
    path: str, kept: _Block, like: _Block, lighter: Mapping[str, _Block], again: _Block
) -> Stage:
    """A block by what one of its kind showed."""
    keep = _option(like, again)
    options = {"keep": keep}
    besides = max(keep.again_bytes - keep.backward_bytes, 0)
    for name, block in lighter.items():
        less = _option(block, None)
        saved = keep.kept_bytes - less.kept_bytes
        if all(less.kept_bytes < other.kept_bytes for other in options.values()):
            peak = max(again.run.rerun_peak(again.at) - saved, less.backward_bytes + besides)
            options[name] = replace(less, again_bytes=peak, again=keep.again)
    run, i = kept.run, kept.at
    return Stage(
        name=path,
        options=options if i == like.at else _shifted_options(options, _option(kept, None)),
        held_bytes=again.run.kept[again.at],
        pass_bytes=again.run.forward_peak(again.at),
        gradient_bytes=run.watch.gradient_bytes.get(i - 1, 0),
        parameter_gradient_bytes=run.gradients[i],
        freed_bytes=max(run.freed[i], *(b.run.freed[b.at] for b in lighter.values()), 0),
        joins=run.joins(i - 1),
    )


def _option(block: _Block, again: _Block | None) -> Option:
    run, i = block.run, block.at
    rerun = again or block
    return Option(
        kept_bytes=run.kept[i],
        forward_bytes=run.forward_peak(i),
        backward_bytes=run.backward_peak(i),
        again_bytes=rerun.run.backward_peak(rerun.at),
        forward=run.work(run.forward[i], Phase.FORWARD),
        again=rerun.run.work(rerun.run.backward[rerun.at], Phase.RECOMPUTE),
        backward=run.work(run.backward[i], Phase.BACKWARD),
    )
