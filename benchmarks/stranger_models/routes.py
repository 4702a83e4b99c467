"""Steps that go another way for each part of a batch, or leave something behind; newer families.

Some have a habit that plans met late: parts of different lengths and experts, targets that are
missing later, weights set by `data`, results that functions remember.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Layer, Made, Stranger, classify, labeled, own_loss, tower
from .families import _words
from .language import WORDS, _sizes

# -- other ways for each part ----------------------------------------------------------------------


class Trimmed(nn.Module):
    """Sequences are cut at the longest of those that run together."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(60, wide), nn.Linear(wide, 60)
        self.layers = nn.Sequential(*(Layer(wide) for _ in range(4)))

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Words → the next ones."""
        made: Tensor = self.out(self.layers(self.words(words[:, : int(lengths.max())])))
        return made


def _trimmed(scale: int) -> Made:
    """The longest come last."""
    lengths = torch.arange(2, 66, 2)
    words = torch.randint(1, 60, (32, 64))
    words[torch.arange(64)[None] >= lengths[:, None]] = 0

    def loss(model: nn.Module, batch: Any) -> Tensor:
        made = model(batch["words"], batch["lengths"])
        aims = batch["words"][:, 1 : made.shape[1]]
        return F.cross_entropy(made[:, :-1].flatten(0, 1), aims.flatten(), ignore_index=0)

    return Trimmed(32 * scale), {"words": words, "lengths": lengths}, loss


class Exits(nn.Module):
    """Examples that are hard go on; where none is, the rest of the layers does not run."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.layers = nn.ModuleList(Layer(wide) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """One of five."""
        hard, hidden = x[:, 0] > 0, self.first(x)
        for number, layer in enumerate(self.layers):
            rows = hard.nonzero()[:, 0] if number > 1 else torch.arange(len(x))
            if not len(rows):
                break
            hidden = hidden.index_copy(0, rows, layer(hidden[rows]))
        made: Tensor = self.last(hidden)
        return made


class Skewed(nn.Module):
    """Experts of three widths, and rows that all go to one."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(48, wide), nn.Linear(wide, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(wide, inner), nn.GELU(), nn.Linear(inner, wide))
            for inner in (wide // 2, wide, 16 * wide)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One of five."""
        which, hidden = (x[:, 0] > -0.3).long() + (x[:, 0] > 0.5).long(), self.first(x)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]))
        made: Tensor = self.last(hidden + out)
        return made


def _in_order(kind: type[nn.Module], wide: int) -> Any:
    """Rows that go the same way lie together."""

    def build(scale: int) -> Made:
        x, labels = labeled(scale, 512)
        x[:, 0] = x[:, 0].sort().values
        return kind(wide * scale), (x, labels), classify

    return build


# -- what is left behind ---------------------------------------------------------------------------


class Contrast(nn.Module):
    """As MoCo: an average set by `data`, and a queue whose end is read."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.fast, self.slow = tower(wide, 16, 3), tower(wide, 16, 3).requires_grad_(False)
        self.slow.load_state_dict(self.fast.state_dict())
        self.register_buffer("queue", F.normalize(torch.randn(256, 16), dim=1))
        self.register_buffer("end", torch.zeros(1, dtype=torch.long))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The loss."""
        query = F.normalize(self.fast(one), dim=1)
        with torch.no_grad():
            for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
                slow.data = slow.data * 0.99 + fast.data * 0.01
            keys = F.normalize(self.slow(other), dim=1)
        alike = (query * keys).sum(1, keepdim=True)
        made = torch.cat([alike, query @ self.queue.clone().T], 1) / 0.07
        start = int(self.end)
        self.queue[start : start + len(keys)] = keys
        self.end[0] = (start + len(keys)) % len(self.queue)
        return F.cross_entropy(made, torch.zeros(len(made), dtype=torch.long))


def _contrast(scale: int) -> Made:
    views = torch.randn(64, 48), torch.randn(64, 48)
    return Contrast(64 * scale), views, lambda m, b: m(*b)


def _missing(scale: int) -> Made:
    """Measurements of which this batch misses none; others do."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        known = ~batch[1].isnan()
        return F.mse_loss(model(batch[0])[known], batch[1][known])

    batch = torch.randn(256 * scale, 48), torch.randn(256 * scale, 5)
    return tower(64 * scale, 5), batch, loss


class Stretches(nn.Module):
    """A recurrent cell."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(8, wide), nn.Linear(wide, 1)


def _truncated(scale: int) -> Made:
    """Backward through six steps at a time, inside the loss."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        state, total = torch.zeros(len(batch), model.out.in_features), torch.zeros(())
        for number in range(1, 24):
            state = model.cell(batch[:, number - 1], state)
            total = total + F.mse_loss(model.out(state), batch[:, number, :1]) / 23
            if number % 6 == 0:
                total.backward()
                state, total = state.detach(), torch.zeros(())
        return total

    return Stretches(64 * scale), torch.randn(64, 24, 8), loss


@functools.lru_cache(maxsize=4)
def _causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


class Remembers(nn.Module):
    """Attention under a mask that a function makes once for all."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.mix, self.layer = nn.Linear(wide, 3 * wide), Layer(wide)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        query, key, value = self.mix(x).chunk(3, -1)
        mask = _causal(x.shape[1])
        x = x + F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        made: Tensor = self.layer(x)
        return made


def _remembered(scale: int) -> Made:
    wide = 32 * scale
    model = nn.Sequential(nn.Linear(8, wide), *(Remembers(wide) for _ in range(4)))
    return model, torch.randn(16, 24, 8), lambda m, b: m(b).square().mean()


# -- images in text --------------------------------------------------------------------------------


def _images_in_text(scale: int) -> Made:
    """Of two sizes, in one row of patches."""
    import transformers

    text = {**_sizes(scale), "num_key_value_heads": 2, "vocab_size": WORDS,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config=text, image_token_id=95, vision_start_token_id=94, vision_end_token_id=93,
        video_token_id=92, vision_config={
            "depth": 3, "embed_dim": 32, "hidden_size": text["hidden_size"], "num_heads": 4,
            "patch_size": 4, "mlp_ratio": 2, "in_channels": 3,
        },
    )  # fmt: skip
    words = torch.randint(5, 90, (2, 24))
    words[:, 1], words[:, 2:10], words[:, 10] = 94, 95, 93
    labels = words.clone()
    labels[:, 1:11] = -100
    batch = {
        "input_ids": words, "labels": labels, "attention_mask": torch.ones_like(words),
        "pixel_values": torch.randn(64, 96), "mm_token_type_ids": (words == 95).long(),
        "image_grid_thw": torch.tensor([[1, 4, 8], [1, 8, 4]]),
    }  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config).train(), batch, own_loss


_GROUPS = {"num_key_value_heads": 2}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
          "mamba_chunk_size": 8}  # fmt: skip
ROUTES = (
    Stranger("trimmed-to-longest", "language", _trimmed),
    Stranger("exits-by-part", "classifier", _in_order(Exits, 64), "sgd"),
    Stranger("experts-skewed", "experts", _in_order(Skewed, 32), "sgd"),
    Stranger("momentum-contrast", "contrastive", _contrast),
    Stranger("targets-missing-later", "regression", _missing),
    Stranger("truncated-backward", "recurrent", _truncated),
    Stranger("remembered-mask", "attention", _remembered),
    Stranger("qwen2-vl", "language", _images_in_text),
    Stranger("gpt-oss", "experts", _words("GptOss", {**_GROUPS, "head_dim": 8,
             "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8})),
    Stranger("qwen3-next", "experts", _words("Qwen3Next", {**_GROUPS, "head_dim": 8,
             "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16})),
    Stranger("bamba", "state space", _words("Bamba", {**_GROUPS, **_MAMBA,
             "attn_layer_indices": [1, 3]})),
    Stranger("falcon-h1", "state space", _words("FalconH1", {**_GROUPS, **_MAMBA,
             "mamba_d_ssm": 64})),
    Stranger("zamba2", "state space", _words("Zamba2", {"mamba_d_state": 8, "mamba_ngroups": 1,
             "n_mamba_heads": 4, "mamba_headdim": 16, "num_key_value_heads": 4,
             "num_mem_blocks": 1, "adapter_rank": 4, "chunk_size": 8, "hybrid_layer_ids": [1, 3],
             "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]})),
)  # fmt: skip
"""Strangers of this kind."""
