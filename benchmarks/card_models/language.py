"""Language models from Hugging Face's configurations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import Made, Subject, in_autocast, own_loss


def _tokens(rows: int, length: int, words: int, *, padded: bool = False) -> dict[str, Tensor]:
    tokens = torch.randint(5, words, (rows, length))
    labels = tokens.clone()
    batch = {"input_ids": tokens, "labels": labels}
    if padded:
        mask = torch.ones_like(tokens)
        for row in range(rows):
            end = length - (row * 37) % (length // 2)
            labels[row, end:], mask[row, end:] = -100, 0
        batch["attention_mask"] = mask
    return batch


def _of(kind: str, sizes: dict[str, Any], shape: tuple[int, int], *, head: str = "CausalLM",
        dtype: torch.dtype = torch.float32, autocast: bool = False,
        padded: bool = False) -> Any:  # fmt: skip
    def build(tiny: bool) -> Made:
        import transformers

        rows, length = (4, 32) if tiny else shape
        given = {
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **sizes,
        }
        if tiny:
            given |= {k: v for k, v in _TINY.items() if k in sizes}
        config = getattr(transformers, f"{kind}Config")(**given)
        name = f"{kind}{head}" if head == "LMHeadModel" else f"{kind}For{head}"
        model = getattr(transformers, name)(config).to(dtype).train()
        loss = in_autocast(own_loss) if autocast else own_loss
        return model, _tokens(rows, length, given["vocab_size"], padded=padded), loss

    return build


_TINY = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4, "head_dim": 16,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "state_size": 8, "num_local_experts": 4, "moe_intermediate_size": 64,
}  # fmt: skip


def _lora(kind: str, sizes: dict[str, Any], shape: tuple[int, int]) -> Any:
    """A frozen bf16 base, FP32 adapters of rank 16 beside every projection."""
    whole = _of(kind, sizes, shape, dtype=torch.bfloat16)

    def build(tiny: bool) -> Made:
        model, batch, loss = whole(tiny)
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name.endswith("_proj"):
                    setattr(module, name, _Adapted(child))
        return model, batch, loss

    return build


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.up(self.down(x.float())).to(x.dtype)
        return made


_LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": True,
}  # fmt: skip
_LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
_QWEN = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA = {
    "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 65536,
}  # fmt: skip
_PHI = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "vocab_size": 51200,
}  # fmt: skip
_MIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 8,
    "vocab_size": 32000,
}  # fmt: skip
_BERT = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 30522,
}  # fmt: skip
_MODERN = {
    "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
    "num_attention_heads": 12, "vocab_size": 50368, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257, "n_positions": 1024,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_T5 = {
    "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12, "num_heads": 12,
    "vocab_size": 32128, "decoder_start_token_id": 0,
}  # fmt: skip
_MAMBA = {
    "hidden_size": 768, "num_hidden_layers": 12, "state_size": 16, "vocab_size": 50280,
}  # fmt: skip
_OPT = {
    "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 12, "num_attention_heads": 16,
    "vocab_size": 50272, "word_embed_proj_dim": 1024, "max_position_embeddings": 2048,
}  # fmt: skip
_BLOOM = {"hidden_size": 1024, "n_layer": 12, "n_head": 16, "vocab_size": 65536}
BF16 = torch.bfloat16
FUSED = "adamw-fused"

LANGUAGE = (
    Subject("llama-1b-bf16", "language", _of("Llama", _LLAMA_1B, (2, 2048), dtype=BF16), FUSED),
    Subject("llama-1b", "language", _of("Llama", _LLAMA_1B, (2, 2048))),
    Subject("llama-8b-bf16", "language", _of("Llama", _LLAMA_8B, (1, 2048), dtype=BF16), FUSED),
    Subject("llama-8b-8x", "language", _of("Llama", _LLAMA_8B, (8, 2048), dtype=BF16), FUSED),
    Subject("llama-1b-lora", "LoRA", _lora("Llama", _LLAMA_1B, (4, 2048))),
    Subject("qwen2-0.5b", "language", _of("Qwen2", _QWEN, (8, 1024))),
    Subject("qwen2-autocast", "autocast",
            _of("Qwen2", _QWEN, (8, 1024), autocast=True, padded=True)),
    Subject("gemma2", "language", _of("Gemma2", _GEMMA, (4, 1024), dtype=BF16)),
    Subject("phi", "language", _of("Phi", _PHI, (8, 512), padded=True)),
    Subject("gpt2-medium", "language", _of("GPT2", _GPT2, (8, 1024), head="LMHeadModel"), FUSED),
    Subject("opt", "language", _of("OPT", _OPT, (8, 1024), autocast=True)),
    Subject("bloom", "language", _of("Bloom", _BLOOM, (8, 512), padded=True)),
    Subject("mixtral", "MoE", _of("Mixtral", _MIXTRAL, (4, 1024), dtype=BF16)),
    Subject("bert-mlm", "language", _of("Bert", _BERT, (32, 512), head="MaskedLM", padded=True)),
    Subject("modernbert", "language", _of("ModernBert", _MODERN, (16, 512), head="MaskedLM")),
    Subject("t5", "encoder-decoder", _of("T5", _T5, (8, 512), head="ConditionalGeneration")),
    Subject("mamba", "state-space", _of("Mamba", _MAMBA, (2, 256))),
)  # fmt: skip
