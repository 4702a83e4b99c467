"""More families of Hugging Face's, and models that people write themselves.

Some have a habit that plans met late: experts filled in place, norms over transposed tokens,
targets that name their image, memories of the step before.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Stranger, own_loss
from .language import WORDS, _sizes, _text

_USUAL = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
_SHORT = {"max_position_embeddings": 64}
_VIT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.0, "num_labels": 5,
}  # fmt: skip


def _words(kind: str, changes: dict[str, Any], head: str = "ForCausalLM", *, mask: bool = True,
           without: tuple[str, ...] = (), config: str | None = None) -> Any:  # fmt: skip
    def build(scale: int) -> Made:
        import transformers

        sizes = {k: v for k, v in _sizes(scale).items() if k not in without}
        made = getattr(transformers, config or f"{kind}Config")(**{**sizes, **changes})
        batch = _text(scale)
        if not mask:
            del batch["attention_mask"]
        return getattr(transformers, kind + head)(made).train(), batch, own_loss

    return build


def _translation(kind: str, changes: dict[str, Any]) -> Any:
    def build(scale: int) -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=WORDS, pad_token_id=1, eos_token_id=3, decoder_start_token_id=2, **changes
        )
        model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).train()
        return model, _text(scale), own_loss

    return build


def _images(kind: str, changes: dict[str, Any], side: int = 32) -> Any:
    def build(scale: int) -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{"num_labels": 5, **changes})
        rows = 16 * scale
        batch = {
            "pixel_values": torch.randn(rows, 3, side, side),
            "labels": torch.arange(rows) % 5,
        }
        return (
            getattr(transformers, f"{kind}ForImageClassification")(config).train(),
            batch,
            own_loss,
        )

    return build


def _video(scale: int) -> Made:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    rows = 8 * scale
    model = VideoMAEForVideoClassification(VideoMAEConfig(**_VIT, num_frames=4, tubelet_size=2))
    batch = {"pixel_values": torch.randn(rows, 4, 3, 32, 32), "labels": torch.arange(rows) % 5}
    return model.train(), batch, own_loss


def _patches_of_series(scale: int) -> Made:
    """Its BatchNorm runs over transposed tokens."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=3, context_length=64, prediction_length=8, patch_length=8,
        patch_stride=8, d_model=32, num_attention_heads=4, num_hidden_layers=3, ffn_dim=64,
        attention_dropout=0.0, ff_dropout=0.0, head_dropout=0.0, positional_dropout=0.0,
        path_dropout=0.0, loss="mse",
    )  # fmt: skip
    rows = 32 * scale
    batch = {"past_values": torch.randn(rows, 64, 3), "future_values": torch.randn(rows, 8, 3)}
    return PatchTSTForPrediction(config).train(), batch, own_loss


def _series(scale: int) -> Made:
    from transformers import TimeSeriesTransformerConfig, TimeSeriesTransformerForPrediction

    config = TimeSeriesTransformerConfig(
        prediction_length=6, context_length=12, input_size=1, lags_sequence=[1, 2, 3],
        num_time_features=2, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
        decoder_ffn_dim=64, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        encoder_layerdrop=0, decoder_layerdrop=0,
    )  # fmt: skip
    rows = 32 * scale
    seen = torch.ones(rows, 6)
    seen[3, 4:] = 0
    batch = {
        "past_values": torch.randn(rows, 15), "past_time_features": torch.randn(rows, 15, 2),
        "past_observed_mask": torch.ones(rows, 15), "future_values": torch.randn(rows, 6),
        "future_time_features": torch.randn(rows, 6, 2), "future_observed_mask": seen,
    }  # fmt: skip
    return TimeSeriesTransformerForPrediction(config).train(), batch, own_loss


class Rays(nn.Module):
    """A radiance field: points on rays, and what is left of the light along them."""

    def __init__(self) -> None:
        super().__init__()
        wide = [36, *[64] * 6]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(wide))
        self.density, self.color = nn.Linear(64, 1), nn.Linear(64, 3)

    def forward(self, start: Tensor, direction: Tensor) -> Tensor:
        """A color for each ray."""
        far = torch.linspace(0.1, 2, 16, device=start.device)
        points = start[:, None] + direction[:, None] * far[None, :, None]
        waves = (points[..., None] * 2.0 ** torch.arange(6, device=start.device)).flatten(-2)
        x = torch.cat([waves.sin(), waves.cos()], -1)
        for layer in self.layers:
            x = F.relu(layer(x))
        taken = 1 - torch.exp(-F.softplus(self.density(x))[..., 0] * 0.1)
        left = torch.cumprod(torch.cat([torch.ones_like(taken[:, :1]), 1 - taken], 1), 1)[:, :-1]
        return ((taken * left)[..., None] * self.color(x).sigmoid()).sum(1)


def _rays(scale: int) -> Made:
    rows = 256 * scale
    batch = torch.randn(rows, 3), F.normalize(torch.randn(rows, 3), dim=1), torch.rand(rows, 3)
    return Rays(), batch, lambda m, b: F.mse_loss(m(b[0], b[1]), b[2])


class Bags(nn.Module):
    """Sums of embeddings, as many for each row as its offsets say."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(500, 32, mode="sum")
        self.dense = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, dense: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        """A score for each row."""
        made: Tensor = self.top(torch.cat([self.dense(dense), self.words(ids, offsets)], 1))
        return made[:, 0]


def _bags(scale: int) -> Made:
    rows = 128 * scale
    lengths = torch.randint(1, 6, (rows,))
    offsets = lengths.cumsum(0) - lengths
    ids = torch.randint(0, 500, (int(lengths.sum()),))
    batch = torch.randn(rows, 13), ids, offsets, torch.rand(rows).round()
    loss = F.binary_cross_entropy_with_logits
    return Bags(), batch, lambda m, b: loss(m(*b[:3]), b[3])


class Detector(nn.Module):
    """A grid of boxes."""

    def __init__(self) -> None:
        super().__init__()
        wide = 3, 16, 24, 32
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU())
            for i, o in pairwise(wide)
        )
        self.head = nn.Conv2d(32, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Nine numbers for each cell."""
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.head(x)
        return made


def _found(model: nn.Module, batch: Any) -> Tensor:
    """Targets name the image they are of."""
    made, targets = model(batch[0]), batch[1]
    cells = made.shape[-1]
    image = targets[:, 0].long()
    x, y = ((targets[:, d] * cells).long().clamp(0, cells - 1) for d in (2, 3))
    there = torch.zeros_like(made[:, 4])
    there[image, y, x] = 1
    chosen = made[image, :, y, x]
    boxes = F.mse_loss(chosen[:, :4].sigmoid(), targets[:, 2:])
    kinds = F.cross_entropy(chosen[:, 5:], targets[:, 1].long())
    return 5 * boxes + kinds + F.binary_cross_entropy_with_logits(made[:, 4], there)


def _detector(scale: int) -> Made:
    rows, boxes = 16 * scale, 40 * scale
    which = torch.randint(0, rows, (boxes, 1)).float()
    targets = torch.cat([which, torch.randint(0, 4, (boxes, 1)).float(), torch.rand(boxes, 4)], 1)
    return Detector(), (torch.randn(rows, 3, 64, 64), targets), _found


class Forced(nn.Module):
    """A decoder that is told the right word half of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.encode = nn.Embedding(60, 32), nn.GRU(32, 48, batch_first=True)
        self.cell, self.head = nn.GRUCell(32, 48), nn.Linear(48, 60)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Scores for each word but the first."""
        state, word, made = self.encode(self.words(source))[1][0], target[:, 0], []
        for step in range(1, target.shape[1]):
            state = self.cell(self.words(word), state)
            made.append(self.head(state))
            word = target[:, step] if random.random() < 0.5 else made[-1].argmax(1)
        return torch.stack(made, 1)


def _forced(scale: int) -> Made:
    rows = 24 * scale
    batch = torch.randint(0, 60, (rows, 12)), torch.randint(0, 60, (rows, 10))
    return Forced(), batch, lambda m, b: F.cross_entropy(m(*b).flatten(0, 1), b[1][:, 1:].flatten())


class Remembering(nn.Module):
    """Attends to the tokens of the step before, if that had as many rows."""

    memory: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(80, 32), nn.Linear(32, 80)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for each token."""
        now = self.words(tokens)
        before = self.memory
        if before is None or len(before) != len(now):
            before = now.detach()
        x = torch.cat([before, now], 1)
        for layer in self.layers:
            x = layer(x)
        self.memory = now.detach()
        made: Tensor = self.head(x[:, -tokens.shape[1] :])
        return made


def _remembering(scale: int) -> Made:
    batch = torch.randint(0, 80, (16 * scale, 16)), torch.randint(0, 80, (16 * scale, 16))
    return Remembering(), batch, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten())


class Latents(nn.Module):
    """Few latents that read many points, with dropout inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.points = nn.Parameter(torch.randn(8, 32)), nn.Linear(3, 32)
        self.read = nn.MultiheadAttention(32, 4, batch_first=True)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, points: Tensor) -> Tensor:
        """One of five kinds."""
        keys, x = self.points(points), self.latents.expand(len(points), -1, -1)
        for layer in self.layers:
            x = layer(x + self.read(x, keys, keys, need_weights=False)[0])
        made: Tensor = self.head(x.mean(1))
        return made


def _latents(scale: int) -> Made:
    batch = torch.randn(32 * scale, 64, 3), torch.arange(32 * scale) % 5
    return Latents(), batch, lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)


FAMILIES = (
    Stranger("qwen3", "language", _words("Qwen3", {"num_key_value_heads": 2, "head_dim": 8})),
    Stranger("gemma3", "language", _words("Gemma3", {"num_key_value_heads": 2, "head_dim": 8,
             "sliding_window": 8}, config="Gemma3TextConfig")),
    Stranger("phi3", "language", _words("Phi3", {"num_key_value_heads": 2})),
    Stranger("cohere", "language", _words("Cohere", {"num_key_value_heads": 2})),
    Stranger("granite", "language", _words("Granite", {"num_key_value_heads": 2})),
    Stranger("olmoe-router", "experts", _words("Olmoe", {"num_experts": 4,
             "num_experts_per_tok": 2, "output_router_logits": True})),
    Stranger("granite-moe-router", "experts", _words("GraniteMoe", {"num_local_experts": 4,
             "num_experts_per_tok": 2, "num_key_value_heads": 2, "output_router_logits": True})),
    Stranger("deepseek-v3", "experts", _words("DeepseekV3", {"num_key_value_heads": 4,
             "n_routed_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 16,
             "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
             "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1,
             "topk_group": 1, "n_shared_experts": 1})),
    Stranger("mamba2", "state space", _words("Mamba2", {"state_size": 16, "num_heads": 8,
             "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
             without=("intermediate_size", "num_attention_heads"))),
    Stranger("recurrent-gemma", "recurrent", _words("RecurrentGemma", {"num_key_value_heads": 1,
             "lru_width": 32, "attention_window_size": 16}, mask=False)),
    Stranger("rwkv", "recurrent", _words("Rwkv", {"attention_hidden_size": 32,
             "context_length": 64}, mask=False, without=("num_attention_heads",))),
    Stranger("gpt-j", "language", _words("GPTJ", {**_GPT, "rotary_dim": 4}, without=_USUAL)),
    Stranger("gpt-big-code", "language", _words("GPTBigCode", {**_GPT, "n_inner": 64},
             without=_USUAL), random=True),
    Stranger("fnet", "language", _words("FNet", {**_SHORT, "hidden_dropout_prob": 0.0,
             "tpu_short_seq_length": 24}, "ForMaskedLM", mask=False,
             without=("num_attention_heads",))),
    Stranger("convbert", "language", _words("ConvBert", {**_SHORT, **_QUIET,
             "embedding_size": 32}, "ForMaskedLM")),
    Stranger("mobilebert", "language", _words("MobileBert", {**_SHORT, **_QUIET,
             "embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32,
             "num_feedforward_networks": 2}, "ForMaskedLM")),
    Stranger("squeezebert", "language", _words("SqueezeBert", {**_SHORT, **_QUIET,
             "embedding_size": 32}, "ForMaskedLM")),
    Stranger("modernbert", "language", _words("ModernBert", {"global_attn_every_n_layers": 2,
             "local_attention": 8, "cls_token_id": 2, "sep_token_id": 3}, "ForMaskedLM")),
    Stranger("longformer", "language", _words("Longformer", {**_SHORT, **_QUIET,
             "attention_window": 4, "sep_token_id": 3}, "ForMaskedLM")),
    Stranger("funnel", "language", _words("Funnel", {"block_sizes": [2, 2], "d_model": 32,
             "n_head": 4, "d_head": 8, "d_inner": 64, "hidden_dropout": 0.0,
             "attention_dropout": 0.0, "activation_dropout": 0.0, "num_decoder_layers": 1},
             "ForMaskedLM", without=_USUAL)),
    Stranger("xlnet", "language", _words("XLNet", {"d_model": 32, "n_layer": 4, "n_head": 4,
             "d_inner": 64, "dropout": 0.0}, "LMHeadModel", mask=False, without=_USUAL)),
    Stranger("t5-dropout", "translation", _translation("T5", {"d_model": 32, "d_kv": 8,
             "d_ff": 64, "num_layers": 3, "num_heads": 4}), random=True),
    Stranger("prophetnet", "translation", _translation("ProphetNet", {**_SHORT, "hidden_size": 32,
             "encoder_ffn_dim": 64, "num_encoder_layers": 2, "num_encoder_attention_heads": 4,
             "decoder_ffn_dim": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 4,
             "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0})),
    Stranger("beit", "vision", _images("Beit", _VIT)),
    Stranger("levit", "vision", _images("Levit", {"image_size": 64, "hidden_sizes": [16, 32, 48],
             "num_attention_heads": [2, 2, 2], "depths": [2, 2, 2], "key_dim": [8, 8, 8],
             "drop_path_rate": 0}, 64)),
    Stranger("resnet", "vision", _images("ResNet", {"embedding_size": 8,
             "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}), "sgd"),
    Stranger("pvt", "vision", _images("Pvt", {"image_size": 32, "hidden_sizes": [16, 24, 32, 48],
             "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
             "mlp_ratios": [2, 2, 2, 2], "drop_path_rate": 0.0,
             "sequence_reduction_ratios": [4, 2, 1, 1]})),
    Stranger("focalnet", "vision", _images("FocalNet", {"image_size": 32, "embed_dim": 16,
             "depths": [1, 1, 2, 1], "drop_path_rate": 0.0})),
    Stranger("videomae", "vision", _video),
    Stranger("patchtst", "series", _patches_of_series),
    Stranger("time-series", "series", _series),
    Stranger("radiance-field", "handwritten", _rays),
    Stranger("embedding-bag", "handwritten", _bags),
    Stranger("boxes-by-image", "handwritten", _detector, "sgd"),
    Stranger("teacher-forcing", "recurrent", _forced, random=True),
    Stranger("remembering", "handwritten", _remembering),
    Stranger("latents-dropout", "handwritten", _latents, random=True),
)  # fmt: skip
