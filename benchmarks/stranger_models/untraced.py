"""Models whose step reads values, calls other libraries, or points at rows of its batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layer, Made, Stranger, classify, labeled, tower


class EarlyExit(nn.Module):
    """Stops at the first layer that is sure enough."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Linear(48, wide)
        self.layers = nn.ModuleList(Layer(wide) for _ in range(6))
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the layer that was sure, or of the last."""
        x = self.enter(x)
        for block in self.layers:
            x = block(x)
            if self.leave(x).softmax(-1).amax(-1).mean().item() > 0.45:
                break
        return self.leave(x)


class Sorted(nn.Module):
    """Leaves with rows that a value decides: how many are kept is known when it runs."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.tower, self.score = tower(wide, wide), nn.Linear(wide, 1)
        self.after, self.leave = nn.ModuleList(Layer(wide) for _ in range(3)), nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Rows with a good score are worked on further."""
        x = self.tower(x)
        kept = (self.score(x)[:, 0] > 0).nonzero()[:, 0]
        some = x[kept]
        for block in self.after:
            some = block(some)
        return self.leave(x.index_copy(0, kept, some))


class InNumpy(torch.autograd.Function):
    """Computed outside of PyTorch, and so is its gradient: no fake tensor follows it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """tanh."""
        made = torch.from_numpy(np.tanh(x.detach().cpu().numpy())).to(x.device)
        ctx.save_for_backward(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Its derivative."""
        (made,) = ctx.saved_tensors
        return gradient * torch.from_numpy(1 - made.cpu().numpy() ** 2).to(made.device)


class Foreign(nn.Module):
    """Blocks with a function of another library between them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Linear(48, wide)
        self.layers = nn.ModuleList(Layer(wide) for _ in range(6))
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = InNumpy.apply(self.enter(x))
        for block in self.layers:
            x = block(x)
        return self.leave(x)


class PackedLstm(nn.Module):
    """Sequences of different lengths, packed as `nn.utils.rnn` packs them."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words = nn.Embedding(99, wide)
        self.lstm = nn.LSTM(wide, wide, 2, batch_first=True)
        self.leave = nn.Linear(wide, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """A class for each sequence."""
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.leave(self.lstm(packed)[1][0][-1])


def _packed(scale: int) -> Made:
    rows = 32 * scale
    batch = {
        "tokens": torch.randint(1, 99, (rows, 24)), "lengths": 5 + torch.arange(rows) * 7 % 20,
        "y": torch.arange(rows) % 5,
    }  # fmt: skip

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["tokens"], b["lengths"]), b["y"])

    return PackedLstm(32 * scale), batch, loss


def _matched(scale: int) -> Made:
    """Set prediction: every target takes the best of the predictions, by the Hungarian method."""

    def loss(model: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        from scipy.optimize import linear_sum_assignment

        made = model(b[0]).unflatten(1, (8, 2))
        costs = torch.cdist(made, b[1])
        lost = []
        for row, cost in enumerate(costs.detach().cpu().numpy()):
            ours, theirs = linear_sum_assignment(cost)
            lost.append(F.l1_loss(made[row][ours.tolist()], b[1][row][theirs.tolist()]))
        return torch.stack(lost).mean()

    rows = 64 * scale
    return tower(32 * scale, 16), (torch.randn(rows, 48), torch.rand(rows, 5, 2)), loss


def _detr(scale: int) -> Made:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24], depths=[1, 1, 1], layer_type="basic",
        out_features=["stage3"],
    )  # fmt: skip
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=backbone, d_model=32, encoder_layers=4, decoder_layers=4,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, num_queries=40, num_labels=5, dropout=0.0,
    )  # fmt: skip
    rows = 6 * scale
    counts = [1 + row % 3 for row in range(rows)]
    labels = [
        {"class_labels": torch.arange(n) % 5, "boxes": torch.rand(n, 4) / 2 + 0.2} for n in counts
    ]
    batch = {"pixel_values": torch.randn(rows, 3, 128, 128), "labels": labels}

    def loss(model: nn.Module, b: dict[str, Any]) -> Tensor:
        value: Tensor = model(**b).loss
        return value

    return DetrForObjectDetection(config).train(), batch, loss


def _gat(scale: int) -> Made:
    """Nodes, edges and labels of one graph: nothing of it can be cut."""
    from torch_geometric.nn import GATv2Conv

    class Gat(nn.Module):
        def __init__(self, wide: int) -> None:
            super().__init__()
            self.enter = nn.Linear(16, wide)
            self.layers = nn.ModuleList(GATv2Conv(wide, wide // 4, heads=4) for _ in range(4))
            self.leave = nn.Linear(wide, 5)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.enter(x)
            for block in self.layers:
                x = x + F.elu(block(x, edges))
            return self.leave(x)

    nodes = 120 * scale
    batch = {"x": torch.randn(nodes, 16), "edges": torch.randint(0, nodes, (2, 4 * nodes)),
             "y": torch.arange(nodes) % 5}  # fmt: skip

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(b["x"], b["edges"]), b["y"])

    return Gat(32 * scale), batch, loss


def _wav2vec2(scale: int) -> Made:
    """As its configuration comes: masked in time by NumPy, layers dropped, dropout."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4),
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        ctc_loss_reduction="mean",
    )  # fmt: skip
    batch = {"input_values": torch.randn(16 * scale, 800),
             "labels": torch.randint(1, 20, (16 * scale, 6))}  # fmt: skip

    def loss(model: nn.Module, b: dict[str, Any]) -> Tensor:
        value: Tensor = model(**b).loss
        return value

    return Wav2Vec2ForCTC(config).train(), batch, loss


def _partners(scale: int) -> Made:
    """Every example is compared with another one, by its row in the batch."""

    def loss(model: nn.Module, b: dict[str, Tensor]) -> Tensor:
        made = model(b["x"])
        return F.cosine_embedding_loss(made, made[b["partner"]], b["alike"])

    rows = 128 * scale
    batch = {"x": torch.randn(rows, 48), "partner": torch.randperm(rows),
             "alike": torch.where(torch.rand(rows) < 0.5, -1.0, 1.0)}  # fmt: skip
    return tower(32 * scale, 16), batch, loss


class OutOfOrder(nn.Module):
    """Blocks that are called in another order than they are kept, one of them twice."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter = nn.Linear(48, wide)
        self.layers = nn.ModuleList(Layer(wide) for _ in range(6))
        self.leave = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.enter(x)
        for number in (0, 2, 3, 4, 5, 2):
            x = self.layers[number](x)
        return self.leave(x)


UNTRACED = (
    Stranger("early-exit", "other", lambda s: (EarlyExit(32 * s), labeled(s), classify)),
    Stranger("numpy-function", "other", lambda s: (Foreign(32 * s), labeled(s), classify)),
    Stranger("kept-rows", "other", lambda s: (Sorted(32 * s), labeled(s), classify)),
    Stranger("lstm-packed", "recurrent", _packed),
    Stranger("set-matching", "vision", _matched),
    Stranger("detr", "vision", _detr),
    Stranger("gatv2", "graph", _gat),
    Stranger("wav2vec2-default", "speech", _wav2vec2, random=True),
    Stranger("partners-by-index", "contrastive", _partners),
    Stranger("out-of-order", "other", lambda s: (OutOfOrder(32 * s), labeled(s), classify)),
)
