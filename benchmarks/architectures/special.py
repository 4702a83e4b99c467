"""Models that use autograd, parameters or inputs in unusual ways."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from .base import Architecture, cross_entropy, labeled_inputs, labeled_tokens
from .vision import Attention, Basic, resnet18


class Experts(nn.Module):
    """Top-2 routing with a capacity for each expert (GShard, Lepikhin et al., 2021).

    Tokens beyond an expert's capacity are dropped, so no shape depends on the data.
    """

    def __init__(self, width: int, experts: int = 8, hidden: int = 512) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.expand = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.project = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        experts = len(self.expand)
        capacity = 2 * len(tokens) * 5 // (4 * experts)
        gates, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        # First choices queue before second ones: (choice, token) in this order.
        assigned = chosen.t().reshape(-1, 1) == torch.arange(experts, device=x.device)
        place = assigned.long().cumsum(0).sub(1).mul(assigned).sum(-1, keepdim=True)
        seat = place == torch.arange(capacity, device=x.device)
        seats = assigned.unsqueeze(2) & seat.unsqueeze(1)
        dispatch = seats.unflatten(0, (2, -1)).to(x.dtype)
        inputs = torch.einsum("ktec,td->ecd", dispatch, tokens)
        outputs = torch.bmm(F.gelu(torch.bmm(inputs, self.expand)), self.project)
        combine = torch.einsum("ktec,tk->tec", dispatch, gates)
        return torch.einsum("tec,ecd->td", combine, outputs).view_as(x)


class MixtureOfExperts(nn.Module):
    """Transformer classifier with experts in place of its MLPs."""

    def __init__(self, width: int = 128, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, width)
        self.attentions = nn.ModuleList(Attention(width, 4) for _ in range(depth))
        self.experts = nn.ModuleList(Experts(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, (attention, experts) in enumerate(
            zip(self.attentions, self.experts, strict=True)
        ):
            x = x + attention(self.norms[2 * index](x))
            x = x + experts(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x).mean(1))


def frozen() -> nn.Module:
    """ResNet-18 of which only the head is trained."""
    model = resnet18(classes=100)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def frozen_early() -> nn.Module:
    """ResNet-18 of which the stem and the first two stages are frozen."""
    model = resnet18(classes=100)
    for part in (model.stem, model.stages[0], model.stages[1]):
        part.requires_grad_(False)
    return model


class Checkpointed(nn.Module):
    """Residual blocks with BatchNorm and dropout, each recomputed in the backward pass."""

    def __init__(self, use_reentrant: bool = False, width: int = 64, depth: int = 6) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(Basic(width, width, 1, nn.BatchNorm2d), nn.Dropout(0.1))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x.mean((2, 3)))


def checkpointed_reentrant() -> nn.Module:
    """The same by the older, reentrant implementation."""
    return Checkpointed(use_reentrant=True)


class Siamese(nn.Module):
    """One encoder applied to both images of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = resnet18(classes=64, width=32)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return F.pairwise_distance(self.encoder(first), self.encoder(second))


def pair_batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of images, and whether they show the same."""
    return torch.randn(n, 3, 64, 64), torch.randn(n, 3, 64, 64), torch.randint(2, (n,))


def contrastive_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Pull same pairs together and push others a margin apart (Hadsell et al., 2006)."""
    first, second, same = batch
    distance = model(first, second)
    return torch.where(same == 1, distance.square(), F.relu(1 - distance).square()).mean()


class MultiInput(nn.Module):
    """A picture, a text and a row of numbers, merged to predict a class and a value."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.image = resnet18(classes=width, width=32)
        self.words = nn.Embedding(4096, width, padding_idx=0)
        self.text = nn.GRU(width, width, batch_first=True)
        self.row = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.merge = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Dropout(0.2))
        self.classify = nn.Linear(width, 10)
        self.estimate = nn.Linear(width, 1)

    def forward(self, image: Tensor, text: Tensor, row: Tensor) -> dict[str, Tensor]:
        _, state = self.text(self.words(text))
        merged = self.merge(torch.cat([self.image(image), state[-1], self.row(row)], 1))
        return {"class": self.classify(merged), "value": self.estimate(merged).squeeze(1)}


def multi_input_batch(n: int) -> dict[str, Any]:
    """A nested dictionary: inputs and targets."""
    return {
        "inputs": {
            "image": torch.randn(n, 3, 64, 64),
            "text": torch.randint(4096, (n, 24)),
            "row": torch.randn(n, 32),
        },
        "targets": {"class": torch.randint(10, (n,)), "value": torch.randn(n)},
    }


def multi_input_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The sum of the losses of both outputs."""
    outputs, targets = model(**batch["inputs"]), batch["targets"]
    classification = F.cross_entropy(outputs["class"], targets["class"])
    return classification + F.smooth_l1_loss(outputs["value"], targets["value"])


class FrugalSwish(torch.autograd.Function):
    """x * sigmoid(x), keeping x alone."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return gradient * gate * (1 + x * (1 - gate))


class Binarize(torch.autograd.Function):
    """The sign, with the straight-through gradient where |x| <= 1: one byte kept per element."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.abs() <= 1)
        return torch.where(x < 0, -1.0, 1.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (inside,) = ctx.saved_tensors
        return gradient * inside


class BinaryConv(nn.Conv2d):
    """Convolution by binarized weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, Binarize.apply(self.weight), self.bias)


class CustomFunction(nn.Module):
    """Convolutions with binary weights and hand-written activations."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.convolutions = nn.ModuleList(
            BinaryConv(width, width, 3, padding=1, bias=False) for _ in range(4)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(4))
        self.head = nn.Linear(width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = FrugalSwish.apply(norm(convolution(x)))
        return self.head(x.mean((2, 3)))


class Recommender(nn.Module):
    """Wide & deep (Cheng et al., 2016): bags of crossed features beside embedded fields."""

    def __init__(self, fields: int = 16, entries: int = 2000, width: int = 16) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(50_000, 1, mode="sum")
        self.history = nn.EmbeddingBag(20_000, 64, mode="mean")
        self.fields = nn.ModuleList(nn.Embedding(entries, width) for _ in range(fields))
        self.deep = nn.Sequential(
            nn.Linear(fields * width + 64 + 13, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, crossed: Tensor, history: Tensor, fields: Tensor, dense: Tensor) -> Tensor:
        embedded = [layer(fields[:, index]) for index, layer in enumerate(self.fields)]
        deep = self.deep(torch.cat([*embedded, self.history(history), dense], 1))
        return (deep + self.wide(crossed)).squeeze(1)


def recommender_batch(n: int) -> dict[str, Tensor]:
    """Crossed features, items seen, categorical fields, numbers, and whether there was a click."""
    return {
        "crossed": torch.randint(50_000, (n, 20)),
        "history": torch.randint(20_000, (n, 50)),
        "fields": torch.randint(2000, (n, 16)),
        "dense": torch.randn(n, 13),
        "click": torch.randint(2, (n,)),
    }


def click_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Binary cross-entropy of the click."""
    logits = model(**{name: value for name, value in batch.items() if name != "click"})
    return F.binary_cross_entropy_with_logits(logits, batch["click"].to(logits.dtype))


_images = labeled_inputs(3, 64, 64, classes=100)
_documents = labeled_tokens(64, 1024, classes=10)

SPECIAL = (
    Architecture(
        "mixture-of-experts",
        MixtureOfExperts,
        _documents,
        cross_entropy,
        8,
        64,
        "top-2 routing with static shapes; memory quadratic in the number of tokens",
    ),
    Architecture(
        "frozen", frozen, _images, cross_entropy, 16, 2048, "nothing is kept for a frozen backbone"
    ),
    Architecture(
        "frozen-early",
        frozen_early,
        _images,
        cross_entropy,
        16,
        2048,
        "nothing is kept for the first half",
    ),
    Architecture(
        "checkpointed",
        Checkpointed,
        _images,
        cross_entropy,
        4,
        256,
        "recomputation of blocks with BatchNorm and dropout",
    ),
    Architecture(
        "checkpointed-reentrant",
        checkpointed_reentrant,
        _images,
        cross_entropy,
        4,
        256,
        "recomputation by a nested backward",
    ),
    Architecture(
        "siamese",
        Siamese,
        pair_batch,
        contrastive_loss,
        16,
        512,
        "a module called twice; its gradients accumulate",
    ),
    Architecture(
        "multi-input",
        MultiInput,
        multi_input_batch,
        multi_input_loss,
        16,
        1024,
        "nested dictionary of inputs, two outputs",
    ),
    Architecture(
        "custom-function",
        CustomFunction,
        _images,
        cross_entropy,
        8,
        512,
        "torch.autograd.Function on activations and on weights",
    ),
    Architecture(
        "recommender",
        Recommender,
        recommender_batch,
        click_loss,
        2048,
        131072,
        "embedding bags and many small embeddings: mostly parameters",
    ),
)
