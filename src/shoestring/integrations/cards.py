"""Which cards a model fits, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..devices import Card
from ..devices import cards as known_cards
from ..errors import InputError
from ..html_table import caption, table
from ..plain_values import PlainValues
from ..planning.ranks import SharedStep
from ..step.shares import ShardingName
from ..techniques.plan import Plan
from ..units import format_size, parse_size, plural
from .configurations import Configured
from .pages import table_page
from .sizes import Sizes


@dataclass(frozen=True)
class CardFit(PlainValues):
    """The answer for one card or one budget.

    Examples:
        >>> answer = ss.will_it_fit("hf:examples/tiny-llama", "8 GB", tokens=32)
        >>> answer.fits, answer.needed_bytes
    """

    budget_bytes: int
    """Bytes PyTorch's allocator may reserve: for a card, its total less the CUDA context."""
    card: str
    """As it is sold; "" for a budget."""
    example: str
    """A product with such a card."""
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

    def _repr_html_(self) -> str:
        """In a notebook."""
        shown = {k: v for k, v in self.as_dict().items() if k != "plan" and v not in (None, "")}
        plan = "–" if self.plan is None else self.plan.short()
        rows = [
            ["", ""],
            ["plan", plan],
            *(
                [k.replace("_", " "), f"{v:,}" if isinstance(v, int) else str(v)]
                for k, v in shown.items()
            ),
        ]
        return caption(str(self), rows)

    def __str__(self) -> str:
        card, needed = format_size(self.budget_bytes), format_size(self.needed_bytes)
        if self.plan is None:
            return f"no: {card} do not hold it, the least found is {needed}"
        more = f"; up to {self.largest_batch:,} examples at once" * (self.largest_batch > 0)
        if self.longest_context:
            more += f", or one of {self.longest_context:,} tokens"
        return f"yes: {needed} of {card} by {self.plan.short()}, {self.slower:.2f}x the time{more}"

    __repr__ = __str__


@dataclass(frozen=True)
class Cards(PlainValues):
    """The answer for each card; `print` shows a table, `html()` a page.

    Examples:
        >>> table = ss.cards("hf:examples/tiny-llama", tokens=32, sizes=["8"])
        >>> [row.largest_batch for row in table.rows]
    """

    model: str
    """As it was named."""
    what: str
    """Batch, length, optimizer and LoRA."""
    plain_bytes: int
    """Needed without a plan."""
    smallest_bytes: int
    """Needed by the plan that needs least."""
    rows: tuple[CardFit, ...]
    """One for each card, from small to large."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "rows": [row.as_dict() for row in self.rows]}

    def cells(self) -> list[list[str]]:
        """A heading, and one line for each card."""
        context = any(row.longest_context is not None for row in self.rows)
        head = [
            "card",
            "such as",
            "usable",
            "fits",
            "by the plan",
            "needs",
            "time",
            "largest batch",
        ]
        lines = [head + ["longest context"] * context]
        for row in self.rows:
            fits = row.plan is not None
            short = row.plan.short() if row.plan is not None else "–"
            cells = [row.card, row.example, format_size(row.budget_bytes)]
            cells += ["yes" if fits else "no", short]
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

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """In a notebook."""
        return table(self.cells())

    def html(self) -> str:
        """One HTML page that loads nothing."""
        note = (
            "Predicted from the configuration, in bytes that PyTorch's allocator reserves. Usable: "
            "what CUDA reports for the smallest of these cards, less its context. Largest batch: "
            "examples at once, of the asked length; microbatches make any batch of them. Longest "
            "context: tokens of one example. Both by the plan that needs least memory."
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
    sizes: Iterable[int | str] | None = None,
    gpus: int = 1,
    sharding: ShardingName = "fsdp",
) -> Cards:
    """Say for each card whether the model trains on it, by which plan, and how large a batch.

    Args:
        model: "hf:FOLDER", "hf:NAME" or "timm:NAME".
        tokens: Tokens of an example, for models of sequences.
        batch: Examples of a step.
        optimizer: The name of one, such as "adamw".
        lora: Settings of LoRA, such as "r=16".
        quantize: "nf4" for frozen weights in 4 bits.
        dtype: Type of the weights: "bf16", "fp16" or "fp32"; by default as the configuration says.
        sizes: Gigabytes of cards, or their names; by default common ones from 8 to 192 GB.
        gpus: Number of cards that share a step, each with a part of the batch.
        sharding: For several: "fsdp" splits the model over them, "ddp" does not.

    Returns:
        One row for each card; `print` shows a table, notebooks too.

    Examples:
        >>> print(ss.cards("hf:./llama-8b", tokens=2048, lora="r=16"))
    """
    ranks = SharedStep(gpus, sharding)
    chosen = _rows_of(sizes)
    given = model if isinstance(model, Configured) else Configured(
        model, tokens=tokens, batch=batch, dtype=dtype, lora=lora, quantize=quantize
    )  # fmt: skip
    return _table(Sizes(given, optimizer, ranks=ranks), chosen)


def will_it_fit(
    model: str | Configured, budget: str | int, *, optimizer: str = "adamw", **how: Any
) -> CardFit:
    """Whether a configuration trains within a budget of reserved bytes.

    Args:
        model: "hf:FOLDER", "hf:NAME" or "timm:NAME".
        budget: Bytes, or text such as "24 GB".
        optimizer: The name of one, such as "adamw".
        how: Keywords of `cards`: `tokens`, `batch`, `lora`, `quantize`, `dtype`.

    Returns:
        Whether it fits, by which plan, and how much memory that needs.

    Examples:
        >>> print(ss.will_it_fit("hf:./llama-8b", "24 GB", tokens=2048, lora="r=16"))
        yes: 19.9 GB of 24.0 GB by plain, 1.00x the time; …
    """
    given = model if isinstance(model, Configured) else Configured(model, **how)
    nbytes = parse_size(budget)
    return _row(Sizes(given, optimizer), nbytes, nbytes)


def _rows_of(sizes: Iterable[int | str] | None) -> list[tuple[int, str, str]]:
    """(usable bytes, as sold, examples) of each size, from small to large, and of named cards."""
    known = known_cards()
    by_size: dict[int, list[Card]] = {}
    for card in known:
        by_size.setdefault(card.gigabytes, []).append(card)
    found = []
    for asked in by_size if sizes is None else sizes:
        text = str(asked).strip()
        number = text.upper().removesuffix("GB").strip()
        alike = [card for card in known if card.name.lower() == text.lower()]
        if not alike and number.isdecimal() and len(number) < 9:
            alike = by_size.get(int(number), [])
        if not alike:
            raise InputError(
                f"no card {text!r} is known",
                hint=f"gigabytes ({', '.join(map(str, by_size))}) or a name such as "
                f"{known[-1].name}; for another, plan with --budget",
            )
        usable = min(card.usable_bytes for card in alike)
        names = ", ".join(card.name for card in alike)
        found.append((usable, f"{alike[0].gigabytes} GB", names))
    return sorted(found)


def _row(sizes: Sizes, size: int, most: int, card: str = "", example: str = "") -> CardFit:
    room, most, model = sizes.margin.limit(size), sizes.margin.limit(most), sizes.model
    found = sizes.choose(room)
    batch = sizes.largest("batch", room, most)
    length = sizes.largest("tokens", room, most) if model.has_context else None
    if length and model.longest:
        length = min(length, model.longest)
    if found is None:
        return CardFit(size, card, example, sizes.least.needed_bytes, None, None, batch, length)
    return CardFit(size, card, example, found.needed_bytes, found.plan, found.slower, batch, length)


def _table(sizes: Sizes, chosen: Sequence[tuple[int, str, str]]) -> Cards:
    model, rows = sizes.model, []
    most = max(usable for usable, _, _ in chosen)
    for usable, card, example in chosen:
        rows.append(_row(sizes, usable, most, card, example))
    long = f" of {model.tokens:,} tokens" if model.has_context else ""
    how = [f"{plural(model.batch, model.unit.removesuffix('s'))}{long}", sizes.optimizer]
    if sizes.ranks.count > 1:
        how[0] += f" on each of {sizes.ranks.count} GPUs ({sizes.ranks.sharding})"
    how += [f"as {model.trains_as}"] * bool(model.trains_as)
    how += [f"LoRA {model.lora}"] * bool(model.lora) + [model.quantize or ""]
    what = " · ".join(part for part in how if part)
    return Cards(model.name, what, sizes.plain_bytes, sizes.least.needed_bytes, tuple(rows))
