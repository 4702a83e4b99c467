"""Hugging Face models from their configurations: random weights, nothing is downloaded.

`transformers` takes seconds to import, so only building a model imports it. Whatever is not a
size is left at the configuration's default: dropout, attention implementation, cache.
"""

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .base import Architecture

VOCABULARY = 4096
LENGTH = 64


def gpt2() -> nn.Module:
    """GPT-2, four layers of 256."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=256,
            n_layer=4,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    # The default, which the name of this class alone does not tell: it would be logged.
    model.loss_type = "ForCausalLM"
    return model


def bert() -> nn.Module:
    """BERT with its masked language head, four layers of 256."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            max_position_embeddings=LENGTH,
        )
    )


def llama() -> nn.Module:
    """Llama, four layers of 256 with two key-value heads for four query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def t5() -> nn.Module:
    """T5, two layers of 256 in the encoder and two in the decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=256,
            d_kv=64,
            d_ff=1024,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    )


def vit() -> nn.Module:
    """ViT, four layers of 192 on 8x8 patches."""
    from transformers import ViTConfig, ViTForImageClassification, initialization

    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=100,
    )
    # `trunc_normal_` draws again until no value is out of bounds, a question fake tensors cannot
    # answer. Its bounds lie 100 standard deviations away here: the plain normal gives the same.
    with patch.object(initialization, "trunc_normal_", initialization.normal_):
        return ViTForImageClassification(config)


def text(n: int) -> dict[str, Tensor]:
    """Token sequences, each its own label."""
    tokens = torch.randint(VOCABULARY, (n, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def translation(n: int) -> dict[str, Tensor]:
    """Token sequences and shorter sequences to produce from them."""
    return {
        "input_ids": torch.randint(VOCABULARY, (n, LENGTH)),
        "labels": torch.randint(VOCABULARY, (n, LENGTH // 2)),
    }


def images(n: int) -> dict[str, Tensor]:
    """Images, each with a class label."""
    return {"pixel_values": torch.randn(n, 3, 64, 64), "labels": torch.randint(100, (n,))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss the model itself computes from its labels."""
    return model(**batch).loss


def _architecture(
    name: str, build: Callable[[], nn.Module], batch: Callable, large: int, note: str
) -> Architecture:
    return Architecture(name, build, batch, loss, 16, large, note)


HUGGINGFACE = (
    _architecture("gpt2", gpt2, text, 384, "Conv1D layers, tanh GELU, tied output"),
    _architecture("bert", bert, text, 512, "post-norm, masked language head, tied output"),
    _architecture("llama", llama, text, 512, "RMSNorm, rotary positions, gated MLP, grouped keys"),
    _architecture(
        "t5", t5, translation, 512, "encoder-decoder, relative positions, cross-attention"
    ),
    _architecture("vit-hf", vit, images, 512, "patches by convolution, no dropout by default"),
)
