"""Vision, speech and both together, from Hugging Face's configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Made, Stranger, in_autocast, own_loss


def _images(scale: int, *, side: int = 32, classes: int = 5) -> dict[str, Tensor]:
    rows = 16 * scale
    return {
        "pixel_values": torch.randn(rows, 3, side, side),
        "labels": torch.arange(rows) % classes,
    }


def _vit_sizes(scale: int) -> dict[str, Any]:
    return {
        "hidden_size": 32 * scale, "intermediate_size": 64 * scale, "num_hidden_layers": 4,
        "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "num_labels": 5,
    }  # fmt: skip


def _classifier(kind: str, changes: dict[str, Any], *, sizes: bool = True, side: int = 32,
                autocast: bool = False) -> Any:  # fmt: skip
    def build(scale: int) -> Made:
        import transformers

        given = {**(_vit_sizes(scale) if sizes else {"num_labels": 5}), **changes}
        config = getattr(transformers, f"{kind}Config")(**given)
        model = getattr(transformers, f"{kind}ForImageClassification")(config).train()
        loss = in_autocast(own_loss) if autocast else own_loss
        return model, _images(scale, side=side), loss

    return build


def _segformer(scale: int) -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16, num_labels=5, drop_path_rate=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip
    rows = 16 * scale
    labels = torch.randint(0, 5, (rows, 64, 64))
    labels[1, 20:], labels[4] = 255, torch.where(torch.rand(64, 64) < 0.5, 255, 1)
    batch = {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": labels}
    return SegformerForSemanticSegmentation(config).train(), batch, own_loss


def _mae(scale: int) -> Made:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    sizes = {k: v for k, v in _vit_sizes(scale).items() if k != "num_labels"}
    config = ViTMAEConfig(
        **sizes, decoder_hidden_size=32, decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4, decoder_intermediate_size=64,
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(16 * scale, 3, 32, 32)}
    return ViTMAEForPreTraining(config).train(), batch, own_loss


def _clip(kind: str) -> Any:
    def build(scale: int) -> Made:
        import transformers

        text = {
            "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
            "max_position_embeddings": 32, "projection_size": 32,
        }  # fmt: skip
        vision = {k: v for k, v in _vit_sizes(1).items() if k != "num_labels"}
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
        model = getattr(transformers, f"{kind}Model")(config).train()
        rows = 16 * scale
        batch = {
            "input_ids": torch.randint(3, 99, (rows, 12)),
            "pixel_values": torch.randn(rows, 3, 32, 32),
            "return_loss": True,
        }
        return model, batch, own_loss

    return build


def _speech(kind: str) -> Any:
    def build(scale: int) -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(
            vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4),
            num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
            mask_time_prob=0.0, layerdrop=0.0, ctc_loss_reduction="mean", hidden_dropout=0.0,
            attention_dropout=0.0, feat_proj_dropout=0.0, activation_dropout=0.0,
            final_dropout=0.0,
        )  # fmt: skip
        rows = 16 * scale
        labels = torch.randint(1, 20, (rows, 10))
        labels[1, 6:] = labels[5, 3:] = -100
        batch = {"input_values": torch.randn(rows, 800), "labels": labels}
        return getattr(transformers, f"{kind}ForCTC")(config).train(), batch, own_loss

    return build


def _whisper(scale: int) -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=16,
        max_source_positions=40, max_target_positions=32, pad_token_id=1, bos_token_id=2,
        eos_token_id=3, decoder_start_token_id=2,
    )  # fmt: skip
    rows = 16 * scale
    labels = torch.randint(4, 99, (rows, 12))
    labels[0, 5:] = labels[3, 9:] = -100
    batch = {"input_features": torch.randn(rows, 16, 80), "labels": labels}
    return WhisperForConditionalGeneration(config).train(), batch, own_loss


def _spectrogram(scale: int) -> Made:
    from transformers import ASTConfig, ASTForAudioClassification

    sizes = {k: v for k, v in _vit_sizes(scale).items() if k not in ("image_size",)}
    config = ASTConfig(**sizes, max_length=48, num_mel_bins=16, frequency_stride=4, time_stride=4)
    rows = 16 * scale
    batch = {"input_values": torch.randn(rows, 48, 16), "labels": torch.arange(rows) % 5}
    return ASTForAudioClassification(config).train(), batch, own_loss


PERCEPTION = (
    Stranger("swin", "vision", _classifier("Swin", {"embed_dim": 16, "depths": [2, 2],
             "num_heads": [2, 4], "window_size": 2, "image_size": 32, "patch_size": 4,
             "num_labels": 5, "drop_path_rate": 0.0}, sizes=False)),
    Stranger("swin-drop-path", "vision", _classifier("Swin", {"embed_dim": 16, "depths": [2, 2],
             "num_heads": [2, 4], "window_size": 2, "image_size": 32, "patch_size": 4,
             "num_labels": 5, "drop_path_rate": 0.3}, sizes=False), random=True),
    Stranger("convnextv2", "vision", _classifier("ConvNextV2", {"hidden_sizes": [8, 16, 24, 32],
             "depths": [1, 1, 2, 1]}, sizes=False, side=64)),
    Stranger("regnet", "vision", _classifier("RegNet", {"embedding_size": 8,
             "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "groups_width": 8},
             sizes=False, side=64), "sgd"),
    Stranger("dinov2", "vision", _classifier("Dinov2", {"image_size": 32, "patch_size": 8})),
    Stranger("deit-autocast", "vision", _classifier("DeiT", {}, autocast=True)),
    Stranger("poolformer", "vision", _classifier("PoolFormer", {"hidden_sizes": [8, 16, 24, 32],
             "depths": [1, 1, 1, 1], "drop_path_rate": 0.0}, sizes=False, side=64)),
    Stranger("segformer-ignored", "vision", _segformer, "sgd"),
    Stranger("mae", "vision", _mae, random=True),
    Stranger("clip-contrastive", "contrastive", _clip("CLIP")),
    Stranger("siglip-contrastive", "contrastive", _clip("Siglip")),
    Stranger("wav2vec2-ctc", "speech", _speech("Wav2Vec2"), random=True),
    Stranger("hubert-ctc", "speech", _speech("Hubert"), random=True),
    Stranger("whisper-padded", "speech", _whisper, random=True),
    Stranger("ast", "speech", _spectrogram),
)  # fmt: skip
