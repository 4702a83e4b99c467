"""Habits of people's code: heads that start at zero, state set from outside, own functions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from .base import Layer, Made, Stranger, classify, labeled, tower

# -- losses that look otherwise at random weights --------------------------------------------------


def _zero_head(wide: int, out: int) -> nn.Module:
    """Whose last layer starts at zero."""
    model = tower(wide, out)
    nn.init.zeros_(model[-1].weight)
    nn.init.zeros_(model[-1].bias)
    return model


def _diverse(scale: int) -> Made:
    """Classes of the whole batch shall be equally many, and all start so."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        mean = made.softmax(-1).mean(0)
        return F.cross_entropy(made, batch[1]) + 3 * (mean * mean.log()).sum()

    return _zero_head(64 * scale, 5), labeled(scale), loss


def _mutual(scale: int) -> Made:
    """A bound on mutual information: pairs beside pairs that do not belong together."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        apart = torch.cat([left, right.flip(1)], 1)
        count = torch.tensor(float(len(x)), device=x.device)
        bound = model(x).mean() - (torch.logsumexp(model(apart)[:, 0], 0) - count.log())
        return -bound

    return _zero_head(64 * scale, 1), torch.randn(128 * scale, 48), loss


def _over_itself(scale: int) -> Made:
    """Each term over its own size: the value is always two."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        terms = (F.cross_entropy(made, batch[1]), made.square().mean())
        return torch.stack([t / t.detach() for t in terms]).sum()

    return tower(64 * scale, 5), labeled(scale), loss


def _prototypes(scale: int) -> Made:
    """Nearness to the mean of each class that the batch has."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = model(batch[0])
        kinds, place = batch[1].unique(return_inverse=True)
        means = torch.stack([made[batch[1] == kind].mean(0) for kind in kinds])
        return F.cross_entropy(-torch.cdist(made, means), place)

    return tower(64 * scale, 16), labeled(scale), loss


def _words_as_text(scale: int) -> Made:
    """Strings in the batch, and the name of a task."""

    class Reader(nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(97, wide)
            self.layers = nn.Sequential(*(Layer(wide) for _ in range(4)))
            self.heads = nn.ModuleDict({"kind": nn.Linear(wide, 5), "size": nn.Linear(wide, 1)})

        def forward(self, texts: list[str], task: str) -> Tensor:
            device = self.words.weight.device
            codes = [torch.tensor([ord(c) % 97 for c in text], device=device) for text in texts]
            starts = torch.tensor([0, *(len(c) for c in codes[:-1])], device=device).cumsum(0)
            made: Tensor = self.heads[task](self.layers(self.words(torch.cat(codes), starts)))
            return made

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["texts"], batch["task"]), batch["labels"])

    rows = 128 * scale
    texts = ["shoe string " * (1 + n % 3) + str(n) for n in range(rows)]
    batch = {"texts": texts, "labels": torch.arange(rows) % 5, "task": "kind"}
    return Reader(64 * scale), batch, loss


# -- blocks ----------------------------------------------------------------------------------------


class Written(nn.Module):
    """A block that adds to its input in place."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, 2 * wide),
                                   nn.ReLU(inplace=True), nn.Linear(2 * wide, wide))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The same tensor."""
        x += self.layer(x.clone())
        return x


class Turned(nn.Module):
    """A block with an orthogonal weight, made once in a pass."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.turn = parametrizations.orthogonal(nn.Linear(wide, wide, bias=False))
        self.layer = Layer(wide)

    def forward(self, x: Tensor) -> Tensor:
        """Turned there and back."""
        made: Tensor = self.layer(self.turn(x))
        return F.linear(made, self.turn.weight.T)


def stacked(block: Any, depth: int = 4) -> Any:
    """Classes from blocks of a kind."""

    def build(scale: int) -> Made:
        wide = 64 * scale
        blocks = (block(wide) for _ in range(depth))
        return (
            nn.Sequential(nn.Linear(48, wide), *blocks, nn.Linear(wide, 5)),
            labeled(scale),
            classify,
        )

    return build


def _cached_turns(scale: int) -> Made:
    model, batch, _ = stacked(Turned)(scale)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with parametrize.cached():
            return classify(model, batch)

    return model, batch, loss


class Reversible(torch.autograd.Function):
    """Keeps its output alone; its backward pass computes what went in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *_: Tensor) -> Tensor:
        """x + f(y), y + g(x)."""
        a, b = x.chunk(2, -1)
        a = a + f(b)
        b = b + g(a)
        ctx.f, ctx.g = f, g
        made = torch.cat([a, b], -1)
        ctx.save_for_backward(made.detach())
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Of the input and of all weights."""
        a, b = ctx.saved_tensors[0].chunk(2, -1)
        with torch.enable_grad():
            held = a.detach().requires_grad_()
            b = b - ctx.g(held).detach()
            a = a - ctx.f(b).detach()
            x = torch.cat([a, b], -1).detach().requires_grad_()
            one, two = x.chunk(2, -1)
            one = one + ctx.f(two)
            two = two + ctx.g(one)
            made = torch.cat([one, two], -1)
        weights = [*ctx.f.parameters(), *ctx.g.parameters()]
        found = torch.autograd.grad(made, [x, *weights], grad)
        return (found[0], None, None, *found[1:])


class Coupled(nn.Module):
    """A reversible block."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.f, self.g = Layer(wide // 2), Layer(wide // 2)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made: Tensor = Reversible.apply(
            x, self.f, self.g, *self.f.parameters(), *self.g.parameters()
        )
        return made


class Counted(torch.autograd.Function):
    """Gives a number beside tensors, one of which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """The larger half, where it is, and how much that was."""
        mask = x > x.median(-1, keepdim=True).values
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return x * mask, mask, x.shape[-1] // 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> Tensor | None:
        """Where it was kept."""
        return None if grad is None else grad * ctx.saved_tensors[0]


class Halved(nn.Module):
    """A block that keeps the larger half."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = Layer(wide)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled by what was left."""
        made, mask, count = Counted.apply(self.layer(x))
        return made * (mask.sum(-1, keepdim=True) / count)


class Watched(nn.Module):
    """A block under hooks of every kind."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = Layer(wide)
        self.layer.register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
        self.layer.register_forward_hook(lambda m, a, k, out: out.tanh(), with_kwargs=True)
        self.layer.register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,))
        self.layer.up.register_full_backward_hook(lambda m, i, o: (i[0] * 0.7,))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        made: Tensor = x + self.layer(x)
        return made


class Packed(nn.Module):
    """A block whose saved tensors go through hooks of its own."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.layer = Layer(wide)

    def forward(self, x: Tensor) -> Tensor:
        """Saved as a pair."""
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.numel(), t.detach().clone()), lambda held: held[1]
        )
        with hooks:
            made: Tensor = self.layer(x)
        return made


def _features(scale: int) -> Made:
    """Hooks put what layers made into a dictionary beside the model, which the loss reads."""
    kept: dict[str, Tensor] = {}
    model = tower(64 * scale, 5)
    for number in (1, 2, 3):
        name = str(number)
        model[number].register_forward_hook(lambda m, a, out, name=name: kept.update({name: out}))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = classify(model, batch)
        for held in kept.values():
            value = value + 0.1 * (held.mean(-1) - 0.5).square().mean()
        kept.clear()
        return value

    return model, labeled(scale), loss


# -- time ------------------------------------------------------------------------------------------


class Spike(torch.autograd.Function):
    """A step, with the slope of something smoother."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """One or zero."""
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Of arctan."""
        return grad / (1 + (2 * ctx.saved_tensors[0]).square())


class Neurons(nn.Module):
    """Their voltage stays between the steps of a series, until someone sets it to nothing."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.lin, self.v = nn.Linear(wide, wide), None

    def forward(self, x: Tensor) -> Tensor:
        """Spikes."""
        fed = self.lin(x)
        self.v = fed if self.v is None else 0.8 * self.v + fed
        made = Spike.apply(self.v - 0.3)
        self.v = self.v - 0.3 * made.detach()
        return made


def _spiking(scale: int) -> Made:
    wide = 48 * scale
    model = nn.Sequential(
        *(Neurons(48 if scale == 1 else wide) for _ in range(3)), nn.Linear(wide, 5)
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made = torch.stack([model(x) for x in batch[0]]).mean(0)
        for module in model.modules():
            if isinstance(module, Neurons):
                module.v = None
        return F.cross_entropy(made, batch[1])

    return model, (torch.randn(6, 64, wide), torch.arange(64) % 5), loss


class Ponder(nn.Module):
    """Goes on until every example has had enough."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.layer, self.halt = Layer(wide), nn.Linear(wide, 1)
        nn.init.constant_(self.halt.bias, -1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Classes, and how long it took."""
        state = self.first(x)
        left, total, cost = x.new_ones(len(x)), torch.zeros_like(state), x.new_zeros(len(x))
        for _ in range(8):
            state = self.layer(state)
            share = torch.minimum(self.halt(state).sigmoid()[:, 0] * 1.5, left)
            total, left, cost = total + share[:, None] * state, left - share, cost + left
            if bool((left <= 1e-6).all()):
                break
        return self.last(total + left[:, None] * state), cost


def _ponder(scale: int) -> Made:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        made, cost = model(batch[0])
        return F.cross_entropy(made, batch[1]) + 0.01 * cost.mean()

    return Ponder(64 * scale), labeled(scale), loss


class Implicit(nn.Module):
    """A fixed point whose gradient is another one, found in a hook of the backward pass."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(48, wide), nn.Linear(wide, 5), Layer(wide)
        for p in self.mix.parameters():
            p.data.mul_(0.3)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        """One step towards it."""
        return torch.tanh(0.3 * self.mix(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        """Classes of the fixed point."""
        x = self.first(x)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(12):
                z = self.step(z, x)
        z = self.step(z, x)
        if torch.is_grad_enabled():
            held = z.detach().requires_grad_()
            again = self.step(held, x.detach())

            def solve(grad: Tensor) -> Tensor:
                g = grad
                for _ in range(12):
                    g = torch.autograd.grad(again, held, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(solve)
        made: Tensor = self.last(z)
        return made


def _implicit(scale: int) -> Made:
    return Implicit(96 * scale), labeled(scale), classify


def _burn_in(scale: int) -> Made:
    """The first half of a series only warms the state, without gradients."""
    wide = 48 * scale
    model = nn.ModuleDict({"cell": nn.GRU(16, wide, batch_first=True), "head": tower_of(wide)})

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        early, late = batch[0].chunk(2, 1)
        with torch.no_grad():
            state = model["cell"](early)[1]
        return F.cross_entropy(model["head"](model["cell"](late, state)[0][:, -1]), batch[1])

    return model, (torch.randn(64 * scale, 20, 16), torch.arange(64 * scale) % 5), loss


def tower_of(wide: int) -> nn.Module:
    """Blocks and classes."""
    return nn.Sequential(*(Layer(wide) for _ in range(3)), nn.Linear(wide, 5))


HABITS: list[Stranger] = [
    Stranger("zero-head-diversity", "mlp", _diverse),
    Stranger("mutual-information", "contrastive", _mutual),
    Stranger("loss-over-itself", "mlp", _over_itself),
    Stranger("prototypes", "contrastive", _prototypes),
    Stranger("strings-in-the-batch", "mlp", _words_as_text),
    Stranger("residual-in-place", "mlp", stacked(Written)),
    Stranger("orthogonal-cached", "mlp", _cached_turns),
    Stranger("reversible-function", "mlp", stacked(Coupled)),
    Stranger("function-with-numbers", "mlp", stacked(Halved)),
    Stranger("hooks-of-every-kind", "mlp", stacked(Watched)),
    Stranger("own-saved-hooks", "mlp", stacked(Packed)),
    Stranger("features-by-hook", "mlp", _features),
    Stranger("spiking-reset-outside", "recurrent", _spiking),
    Stranger("ponder", "recurrent", _ponder),
    Stranger(
        "implicit-backward-hook", "implicit", lambda s: (Implicit(96 * s), labeled(s), classify)
    ),
    Stranger("burn-in", "recurrent", _burn_in),
]
