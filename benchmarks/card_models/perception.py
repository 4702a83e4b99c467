"""Vision, speech, diffusion and graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Subject, in_autocast, own_loss


def _classified(kind: str, sizes: dict[str, Any], rows: int, side: int = 224, *,
                autocast: bool = False, dtype: torch.dtype = torch.float32) -> Any:  # fmt: skip
    def build(tiny: bool) -> Made:
        import transformers

        count, width = (4, 64) if tiny else (rows, side)
        given = {"num_labels": 100, **sizes}
        if "image_size" in given:
            given["image_size"] = width
        if tiny:
            given |= {k: v for k, v in _TINY.items() if k in sizes}
        config = getattr(transformers, f"{kind}Config")(**given)
        model = getattr(transformers, f"{kind}ForImageClassification")(config).to(dtype).train()
        batch = {
            "pixel_values": torch.randn(count, 3, width, width).to(dtype),
            "labels": torch.arange(count) % 100,
        }
        return model, batch, in_autocast(own_loss) if autocast else own_loss

    return build


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "window_size": 4,
         "num_attention_heads": 4, "num_heads": [1, 2, 2, 4], "depths": [1, 2, 2, 1],
         "embed_dim": 32,
         "hidden_sizes": [16, 32, 64, 128]}  # fmt: skip
_VIT_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
          "num_attention_heads": 16, "image_size": 224}  # fmt: skip
_SWIN = {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "image_size": 224,
         "window_size": 7, "drop_path_rate": 0.0}  # fmt: skip
_CONVNEXT = {"depths": [3, 3, 9, 3], "hidden_sizes": [96, 192, 384, 768]}
_DINO = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 224,
         "patch_size": 14}  # fmt: skip
_RESNET = {"depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]}


def _segformer(tiny: bool) -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    rows, side = (2, 64) if tiny else (8, 512)
    config = SegformerConfig(num_labels=20, drop_path_rate=0.0, depths=[3, 4, 6, 3],
                             hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=256)  # fmt: skip
    labels = torch.randint(0, 20, (rows, side, side))
    batch = {"pixel_values": torch.randn(rows, 3, side, side), "labels": labels}
    return SegformerForSemanticSegmentation(config).train(), batch, own_loss


def _whisper(tiny: bool) -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    rows, width, layers, heads = (2, 64, 2, 4) if tiny else (8, 768, 8, 12)
    config = WhisperConfig(
        d_model=width, encoder_layers=layers, decoder_layers=layers,
        encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, use_cache=False,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).train()
    batch = {
        "input_features": torch.randn(rows, 80, 3000),
        "labels": torch.randint(0, 1000, (rows, 32 if tiny else 200)),
    }
    return model, batch, own_loss


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(64, width)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(when)[:, :, None, None]
        made: Tensor = x + self.conv2(F.silu(self.norm2(h)))
        return made


class _UNet(nn.Module):
    """Noise → noise with skip connections, told the time."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(
            nn.ModuleList(_Residual(w) for _ in range(blocks)) for w in widths
        )
        self.up = nn.ModuleList(nn.ModuleList(_Residual(w) for _ in range(blocks)) for w in widths)
        self.smaller = nn.ModuleList(nn.Conv2d(w, 2 * w, 3, 2, 1) for w in widths[:-1])
        self.larger = nn.ModuleList(nn.Conv2d(2 * w, w, 3, padding=1) for w in widths[:-1])

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for level, stage in enumerate(self.down):
            for block in stage:
                x = block(x, when)
            if level < len(self.smaller):
                kept.append(x)
                x = self.smaller[level](x)
        for level in reversed(range(len(self.up))):
            if level < len(self.larger):
                x = self.larger[level](F.interpolate(x, scale_factor=2)) + kept[level]
            for block in self.up[level]:
                x = block(x, when)
        made: Tensor = self.last(x)
        return made


def _diffusion(tiny: bool) -> Made:
    rows, side, width = (2, 32, 16) if tiny else (16, 256, 64)
    batch = {"images": torch.randn(rows, 3, side, side), "noise": torch.randn(rows, 3, side, side),
             "when": torch.randn(rows, 64)}  # fmt: skip

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(model(batch["images"] + batch["noise"], batch["when"]), batch["noise"])

    return _UNet(width, 2).train(), batch, loss


class _GraphLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.theirs, self.norm = (
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        gathered = torch.zeros_like(x).index_add(0, edges[1], self.theirs(x)[edges[0]])
        made: Tensor = x + F.relu(self.norm(self.own(x) + gathered))
        return made


class _Graph(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(100, width)
        self.layers = nn.ModuleList(_GraphLayer(width) for _ in range(layers))
        self.last = nn.Linear(width, 40)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edges)
        made: Tensor = self.last(x)
        return made


def _graph(tiny: bool) -> Made:
    nodes, edges, width = (200, 800, 32) if tiny else (100_000, 800_000, 256)
    batch = {"x": torch.randn(nodes, 100), "edges": torch.randint(nodes, (2, edges)),
             "y": torch.randint(40, (nodes,))}  # fmt: skip
    return (
        _Graph(width, 6).train(),
        batch,
        lambda m, b: F.cross_entropy(m(b["x"], b["edges"]), b["y"]),
    )


def _torchvision(name: str, rows: int) -> Any:
    def build(tiny: bool) -> Made:
        import torchvision

        model = getattr(torchvision.models, name)(weights=None).train()
        count, side = (2, 64) if tiny else (rows, 224)
        batch = torch.randn(count, 3, side, side), torch.arange(count)
        return model, batch, lambda m, b: F.cross_entropy(m(b[0]), b[1])

    return build


def _detr(tiny: bool) -> Made:
    """Boxes are matched to objects on the host, so it cannot be traced."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    shape: dict[str, Any] = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64]}
    sizes: dict[str, Any] = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    sizes |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10}
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        num_labels=91,
        backbone_config=ResNetConfig(out_features=["stage4"], **shape if tiny else {}),
        **sizes if tiny else {},
    )  # fmt: skip
    rows, side = (2, 64) if tiny else (8, 640)
    labels = [{"class_labels": torch.arange(n) % 90, "boxes": torch.rand(n, 4) / 2 + 0.2}
              for n in (3 + row % 5 for row in range(rows))]  # fmt: skip
    batch = {"pixel_values": torch.randn(rows, 3, side, side), "labels": labels}
    return DetrForObjectDetection(config).train(), batch, own_loss


FUSED = "adamw-fused"

PERCEPTION = (
    Subject("vit-l", "vision", _classified("ViT", _VIT_L, 32)),
    Subject("vit-l-autocast", "autocast", _classified("ViT", _VIT_L, 64, autocast=True), FUSED),
    Subject("swin-t", "vision", _classified("Swin", _SWIN, 64)),
    Subject("convnext-t", "vision", _classified("ConvNext", _CONVNEXT, 64)),
    Subject("dinov2", "vision", _classified("Dinov2", _DINO, 32, dtype=torch.bfloat16)),
    Subject("resnet-50", "vision", _classified("ResNet", _RESNET, 128), "sgd"),
    Subject("regnet", "vision", _torchvision("regnet_y_8gf", 64), "sgd"),
    Subject("segformer", "segmentation", _segformer),
    Subject("whisper", "speech", _whisper),
    Subject("u-net", "diffusion", _diffusion),
    Subject("graph", "graph", _graph),
    Subject("detr", "detection", _detr),
)  # fmt: skip
