"""What fits which card, from a configuration alone.

A model of many equal layers is traced with two and with four of them. The bytes of each phase of
a step, forward, backward and update, grow by the same amount with every layer; so do its seconds.
What is live at an instant is linear in examples and in tokens, too, so that two sizes tell the
largest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..devices import cards as known_cards
from ..errors import InputError
from ..memory.device import device_timeline
from ..memory.items import leaves, part, read, write
from ..planning.planner import MARGIN, Planner
from ..planning.search import Candidate
from ..planning.settings import Setting
from ..step.trace_step import capture_step
from ..techniques.plan import Plan
from ..trace.passes import peak_only
from ..units import format_size, parse_size, plural
from .configurations import Configured, loss_of
from .pages import table, table_page

FEW, MORE = 2, 4
"""Layers that are traced in place of all."""
_PHASES = ("forward", "backward", "optimizer")
_MOST_SETTINGS, _MOST_TRACED = 64, 4
"""Settings beside schedules that are estimated, and those of them that are traced."""
_MOST_POINTS = 12
"""Schedules between the plain step and the smallest."""


@dataclass(frozen=True)
class CardFit:
    """What one card, or a budget, can train."""

    budget_bytes: int
    example: str
    needed_bytes: int
    """By the plan below; where nothing fits, the least that was found."""
    plan: Plan | None
    """For the asked batch and length; None where nothing fits."""
    slower: float | None
    """Time of a step by the plan, to that of the plain one."""
    largest_batch: int
    """Examples at once, of the asked length."""
    longest_context: int | None
    """Tokens of one example; None where a model has no length."""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        plan = None if self.plan is None else self.plan.to_dict()
        return {**vars(self), "fits": self.fits, "plan": plan}

    def __str__(self) -> str:
        card, needed = format_size(self.budget_bytes), format_size(self.needed_bytes)
        if self.plan is None:
            return f"no: {card} do not hold it, the least found is {needed}"
        more = f"; up to {self.largest_batch:,} examples at once" * (self.largest_batch > 0)
        if self.longest_context:
            more += f", or one of {self.longest_context:,} tokens"
        return f"yes: {needed} of {card} by {self.plan.short()}, {self.slower:.2f}x the time{more}"


@dataclass(frozen=True)
class Cards:
    """What fits which card; `print` shows a table, `html()` a page."""

    model: str
    what: str
    plain_bytes: int
    smallest_bytes: int
    rows: tuple[CardFit, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}

    def cells(self) -> list[list[str]]:
        """A heading and a line a card."""
        context = any(row.longest_context is not None for row in self.rows)
        head = ["card", "such as", "fits", "by the plan", "needs", "time", "largest batch"]
        lines = [head + ["longest context"] * context]
        for row in self.rows:
            fits = row.plan is not None
            short = row.plan.short() if row.plan is not None else "–"
            cells = [f"{row.budget_bytes / 1e9:g} GB", row.example, "yes" if fits else "no", short]
            cells += [format_size(row.needed_bytes), f"{row.slower:.2f}x" if row.slower else "–"]
            cells.append(f"{row.largest_batch:,}" if row.largest_batch else "–")
            if context:
                cells.append(f"{row.longest_context:,}" if row.longest_context else "–")
            lines.append(cells)
        return lines

    def __str__(self) -> str:
        cells = self.cells()
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
        first = f"{self.model} · {self.what} · plain {format_size(self.plain_bytes)}"
        return "\n".join([first, *(line.rstrip() for line in lines)])

    def _repr_html_(self) -> str:
        """In a notebook."""
        return table(self.cells())

    def html(self) -> str:
        """One page, nothing to load."""
        note = (
            "Predicted from the configuration. Largest batch: examples at once, of the asked "
            "length; microbatches make any batch of them. Longest context: tokens of one example. "
            "Both by the plan that needs least memory."
        )
        return table_page(f"{self.model}: what fits which card", self.what, self.cells(), note)


def cards(
    model: str | Configured,
    *,
    tokens: int = 2048,
    batch: int = 1,
    optimizer: str = "adamw",
    lora: str | None = None,
    quantize: str | None = None,
    dtype: str | None = None,
    sizes: Iterable[int] | None = None,
) -> Cards:
    """What trains on which card: by which plan, how much slower, how large, how long.

    Args:
        model: "hf:FOLDER", "hf:NAME" or "timm:NAME".
        tokens: Of an example, where the model has a length.
        batch: Examples of a step.
        optimizer: Its name.
        lora: Settings of LoRA, such as "r=16".
        quantize: "nf4" for frozen weights in 4 bits.
        dtype: Of the weights: "bf16", "fp16" or "fp32"; by default as the configuration says.
        sizes: Gigabytes of cards; by default those people have.

    Returns:
        One row for each card; `print` shows a table, notebooks too.

    Examples:
        >>> print(ss.cards("hf:./llama-8b", tokens=2048, lora="r=16"))
    """
    given = model if isinstance(model, Configured) else Configured(
        model, tokens=tokens, batch=batch, dtype=dtype, lora=lora, quantize=quantize
    )  # fmt: skip
    by_size = dict(known_cards())
    chosen = sorted(by_size if sizes is None else sizes)
    if unknown := [size for size in chosen if not 0 < size <= 10**6]:
        raise InputError(
            f"no card has {unknown[0]} GB", hint=f"such as {', '.join(map(str, by_size))}"
        )
    found = [(size * 10**9, by_size.get(size, "")) for size in chosen]
    return _Sizes(given, optimizer).table(found)


def will_it_fit(
    model: str | Configured, budget: str | int, *, optimizer: str = "adamw", **how: Any
) -> CardFit:
    """Whether a configuration trains within a budget.

    Args:
        model: "hf:FOLDER", "hf:NAME" or "timm:NAME".
        budget: Bytes, or text such as "24 GB".
        optimizer: Its name.
        how: Keywords of `cards`: `tokens`, `batch`, `lora`, `quantize`, `dtype`.

    Returns:
        Whether it fits, by which plan, and what that needs.

    Examples:
        >>> print(ss.will_it_fit("hf:./llama-8b", "24 GB", tokens=2048, lora="r=16"))
        yes: 19.9 GB of 24.0 GB by plain, 1.00x the time; …
    """
    given = model if isinstance(model, Configured) else Configured(model, **how)
    return _Sizes(given, optimizer).table([(parse_size(budget), "")]).rows[0]


@dataclass(frozen=True)
class _Line:
    """Bytes of each phase, by layers."""

    at_few: dict[str, float]
    each: dict[str, float]

    def peak(self, more_layers: float) -> float:
        return max(self.at_few[p] + more_layers * self.each[p] for p in _PHASES)


class _Sizes:
    """What a model takes by plan, batch and length."""

    def __init__(self, model: Configured, optimizer: str) -> None:
        self._model, self._optimizer = model, optimizer
        depth = model.depth
        self._layers: tuple[int, ...] = (FEW, MORE) if depth and depth > MORE + 1 else ()
        self._more = (depth or 0) - FEW
        self._free = 1 - MARGIN["cuda"]

    @cached_property
    def _built(self) -> list[Any]:
        """Models of few and of more layers, or the whole one alone."""
        if not self._layers:
            return [self._model.build()[0]]
        return [self._model.with_layers(n).build()[0] for n in self._layers]

    @cached_property
    def _planners(self) -> list[Planner]:
        _, batch = self._model.build() if not self._layers else self._model.with_layers(1).build()
        return [
            Planner(
                m, batch, loss=loss_of, optimizer=self._optimizer, allow="lossless", device="cuda"
            )
            for m in self._built
        ]

    @cached_property
    def _fronts(self) -> list[list[Candidate]]:
        """Schedules worth having, of each; of many alike a few."""
        found = []
        for planner in self._planners:
            front = sorted(planner.estimates.front(Setting()), key=lambda c: -c.peak_bytes)
            apart = max(len(front) - 1, 1) / _MOST_POINTS
            kept = sorted({round(n * apart) for n in range(_MOST_POINTS + 1)})
            found.append([front[n] for n in kept if n < len(front)])
        return found

    def table(self, chosen: Sequence[tuple[int, str]]) -> Cards:
        front = self._front()
        plain = next(point for point in front if point[2] == Plan())
        least = min(front, key=lambda point: point[0])
        whole = min((p for p in front if p[2].at_once is None), key=lambda point: point[0])[2]
        batches = self._line_by(batch=(1, 9), plan=whole)
        lengths = None
        if self._model.has_context:
            lengths = self._line_by(tokens=(1024, 3072), plan=whole)
        rows = []
        for size, example in chosen:
            room = size * self._free
            fits = next((point for point in front if point[0] <= room), None)
            needed, slower, plan = fits or (least[0], None, None)
            batch = _largest(batches, room)
            length = None if lengths is None else _largest(lengths, room)
            rows.append(CardFit(size, example, int(needed), plan, slower, batch, length))
        model = self._model
        long = f" of {model.tokens:,} tokens" if model.has_context else ""
        how = [f"{plural(model.batch, model.unit.removesuffix('s'))}{long}", self._optimizer]
        how += [f"LoRA {model.lora}"] * bool(model.lora) + [model.quantize or ""]
        what = " · ".join(part for part in how if part)
        return Cards(model.name, what, int(plain[0]), int(least[0]), tuple(rows))

    def _front(self) -> list[tuple[float, float, Plan]]:
        """(bytes, time to plain, plan) from the plain step to the smallest, for all layers."""
        schedules = [c for c in self._fronts[-1] if c.scheduled is not None]
        ends = [Plan(), *([schedules[-1].plan] if schedules else [])]
        exact = [self._bytes(plan, self._model.batch, self._model.tokens) for plan in ends]
        base = self._seconds(None)
        front = [(exact[0], 1.0, Plan())]
        if len(ends) == 1 or exact[1] >= exact[0]:
            schedules = schedules[:0]
        for candidate in schedules:
            highest, lowest = schedules[0].peak_bytes, schedules[-1].peak_bytes
            # Between the two ends by their estimates: a maximum of sums lies below its chord.
            share = (candidate.peak_bytes - lowest) / max(highest - lowest, 1)
            nbytes = exact[1] + share * (exact[0] - exact[1])
            if nbytes < front[-1][0]:
                slower = self._seconds(candidate.plan) / base
                front.append((nbytes, slower, self._for_all(candidate.plan)))
        return sorted([*front, *self._with_offers()], key=lambda point: point[1])

    def _with_offers(self) -> list[tuple[float, float, Plan]]:
        """Of every other lossless setting, microbatches and the like, what is worth having."""
        last = self._planners[-1]
        plain = last.estimates.plain.seconds or 1.0
        known: list[Candidate] = []
        for setting in [s for s in last._settings(last.allowed) if s.offers][:_MOST_SETTINGS]:
            front = last.estimates.front(setting)
            if front:
                known.append(min(front, key=lambda c: c.peak_bytes))
                known.append(min(front, key=lambda c: c.seconds))
        best: list[Candidate] = []
        for candidate in sorted(known, key=lambda c: (c.seconds, c.peak_bytes)):
            if not best or candidate.peak_bytes < best[-1].peak_bytes:
                best.append(candidate)
        apart = max(len(best) - 1, 1) / _MOST_TRACED
        kept = sorted({round(n * apart) for n in range(_MOST_TRACED + 1)})
        found = []
        for candidate in [best[n] for n in kept if n < len(best)]:
            nbytes = self._bytes(candidate.plan, self._model.batch, self._model.tokens)
            found.append((nbytes, candidate.seconds / plain, self._for_all(candidate.plan)))
        return found

    def _seconds(self, plan: Plan | None) -> float:
        """Of a step of all layers; None for the plain one."""
        found = []
        for planner, front in zip(self._planners, self._fronts, strict=True):
            if plan is None:
                found.append(planner.estimates.plain.seconds or 0.0)
                continue
            blocks = next((_blocks(c.plan) for c in front if _blocks(c.plan)), 0)
            scaled = _stretched(plan, blocks).to_dict()
            near = [c.seconds for c in front if _stretched(c.plan, blocks).to_dict() == scaled]
            found.append(near[0] if near else min(front, key=lambda c: c.peak_bytes).seconds)
        if not self._layers:
            return found[0]
        return found[0] + (found[1] - found[0]) / (MORE - FEW) * self._more

    def _for_all(self, plan: Plan) -> Plan:
        """The plan of the traced layers, for all of them."""
        return _stretched(plan, self._more + FEW) if self._layers else plan

    def _bytes(self, plan: Plan, batch: int, tokens: int) -> float:
        return self._line(plan, batch, tokens).peak(self._more if self._layers else 0)

    def _line(self, plan: Plan, batch: int, tokens: int) -> _Line:
        found = []
        for model, layers in zip(self._built, self._layers or (None,), strict=True):
            sized = self._model.sized(batch=batch, tokens=tokens)
            data = (sized if layers is None else sized.with_layers(1)).build()[1]
            scaled = plan if layers is None else _stretched(plan, layers)
            with peak_only():
                trace = capture_step(
                    scaled, model, data, loss=loss_of, optimizer=self._optimizer, device="cuda"
                )
            found.append(_by_phase(trace))
        if len(found) == 1:
            return _Line(found[0], dict.fromkeys(_PHASES, 0.0))
        each = {p: (found[1][p] - found[0][p]) / (MORE - FEW) for p in _PHASES}
        return _Line(found[0], each)

    def _line_by(self, *, plan: Plan, **sizes: tuple[int, int]) -> list[tuple[int, float, float]]:
        """(size, bytes) at one size, and bytes more for each further one, by phase."""
        ((name, (first, second)),) = sizes.items()
        more = self._more if self._layers else 0
        other = {"batch": self._model.batch, "tokens": self._model.tokens, name: 0}
        if name == "tokens":
            other["batch"] = 1
        lines = [self._line(plan, **{**other, name: size}) for size in (first, second)]
        found = []
        for phase in _PHASES:
            one, two = (line.at_few[phase] + more * line.each[phase] for line in lines)
            found.append((first, one, (two - one) / (second - first)))
        return found


def _largest(line: list[tuple[int, float, float]], room: float) -> int:
    """The largest size of which every phase fits; 0 for none."""
    sizes = []
    for first, nbytes, each in line:
        if each > 0:
            sizes.append(math.floor(first + (room - nbytes) / each))
        elif nbytes > room:
            return 0
    return max(min(sizes, default=0), 0)


def _by_phase(trace: Any) -> dict[str, float]:
    timeline = device_timeline(trace)
    totals = timeline.totals
    found = dict.fromkeys(_PHASES, 0.0)
    for (_, phase, _), total in zip(timeline.labels, totals, strict=True):
        name = str(phase).lower()
        key = next((p for p in _PHASES if p.startswith(name[:4])), "backward")
        found[key] = max(found[key], float(total))
    return found


def _blocks(plan: Plan) -> int:
    """For how many blocks its schedule is; 0 where it has none."""
    held = (settings.get("schedule") for settings in plan.to_dict().values())
    return next((sum(leaves(item) for item in read(texts)) for texts in held if texts), 0)


def _stretched(plan: Plan, blocks: int) -> Plan:
    """A plan by block for another number of blocks: each block as the one at its place."""
    changed: dict[str, Any] = {}
    for name, settings in plan.to_dict().items():
        if "schedule" in settings and blocks:
            items = read(settings["schedule"])
            known = sum(leaves(item) for item in items)
            every = [
                part(items, n * known // blocks, n * known // blocks + 1)[0] for n in range(blocks)
            ]
            settings = {k: v for k, v in settings.items() if k != "blocks"}
            settings["schedule"] = list(write(every))
        changed[name] = settings
    return Plan.from_dict(changed)
