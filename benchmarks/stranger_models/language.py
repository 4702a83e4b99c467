"""Language models of Hugging Face, padded as batches of text are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Stranger, in_autocast, own_loss

WORDS = 199


def _text(scale: int, *, padded: bool = True) -> dict[str, Tensor]:
    rows, length = 16 * scale, 24 * scale
    tokens = torch.randint(5, WORDS, (rows, length))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    if padded:
        for row in range(rows):
            end = length - (row * 5) % (length - 6)
            tokens[row, end:], labels[row, end:], mask[row, end:] = 1, -100, 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _sizes(scale: int) -> dict[str, Any]:
    return {
        "vocab_size": WORDS, "hidden_size": 32 * scale, "intermediate_size": 64 * scale,
        "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 1, "bos_token_id": 2,
        "eos_token_id": 3,
    }  # fmt: skip


def _of(kind: str, changes: dict[str, Any] | None = None, *, head: str = "CausalLM",
        padded: bool = True, autocast: bool = False, bf16: bool = False) -> Any:  # fmt: skip
    def build(scale: int) -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**{**_sizes(scale), **(changes or {})})
        model = getattr(transformers, f"{kind}For{head}")(config).train()
        if bf16:
            model = model.to(torch.bfloat16)
        loss = in_autocast(own_loss) if autocast else own_loss
        return model, _text(scale, padded=padded), loss

    return build


def _seq2seq(kind: str, changes: dict[str, Any]) -> Any:
    def build(scale: int) -> Made:
        import transformers

        shared = {
            "vocab_size": WORDS, "d_model": 32 * scale, "encoder_layers": 2, "decoder_layers": 2,
            "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64 * scale, "decoder_ffn_dim": 64 * scale, "pad_token_id": 1,
            "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2,
            "max_position_embeddings": 64 * scale, **changes,
        }  # fmt: skip
        config = getattr(transformers, f"{kind}Config")(**shared)
        head = "MTModel" if kind == "Marian" else "ForConditionalGeneration"
        return getattr(transformers, kind + head)(config).train(), _text(scale), own_loss

    return build


def _questions(scale: int) -> Made:
    from transformers import RobertaConfig, RobertaForQuestionAnswering

    model = RobertaForQuestionAnswering(RobertaConfig(**_sizes(scale))).train()
    batch = _text(scale)
    del batch["labels"]
    rows = len(batch["input_ids"])
    batch["start_positions"] = torch.arange(rows) % 5
    batch["end_positions"] = torch.arange(rows) % 5 + 3
    return model, batch, own_loss


def _tagged(scale: int) -> Made:
    from transformers import ElectraConfig, ElectraForTokenClassification

    config = ElectraConfig(**_sizes(scale), embedding_size=32, num_labels=7)
    batch = _text(scale)
    batch["labels"] = torch.where(batch["labels"] < 0, -100, batch["labels"] % 7)
    return ElectraForTokenClassification(config).train(), batch, own_loss


def _ranked(scale: int) -> Made:
    """Preferences of pairs (DPO without its reference): a sequence's likelihood, not a token's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**_sizes(scale), num_key_value_heads=2)).train()
    good, bad = _text(scale), _text(scale)
    batch = {"good": good["input_ids"], "bad": bad["input_ids"], "mask": good["attention_mask"]}

    def likelihood(model: nn.Module, tokens: Tensor, mask: Tensor) -> Tensor:
        logits = model(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        taken = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return (taken * mask[:, 1:]).sum(1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        better = likelihood(model, batch["good"], batch["mask"])
        return -F.logsigmoid(0.1 * (better - likelihood(model, batch["bad"], batch["mask"]))).mean()

    return model, batch, loss


def _items(scale: int) -> Made:
    """As Hugging Face's trainer calls it: the number of labels of the whole batch goes along."""
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**_sizes(scale), num_key_value_heads=2)).train()
    batch: dict[str, Any] = _text(scale)
    batch["num_items_in_batch"] = (batch["labels"][:, 1:] != -100).sum()
    return model, batch, own_loss


def _lora(scale: int) -> Made:
    """Frozen weights, low-rank updates beside every projection."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_sizes(scale), num_key_value_heads=2)).train()
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), 4))
    return model, _text(scale), own_loss


class LowRank(nn.Module):
    """A frozen linear layer and its low-rank update (Hu et al., 2021), with dropout."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer, and what was learned."""
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


_TWO = {"num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL_MOE = {**_TWO, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
              "shared_expert_intermediate_size": 32, "output_router_logits": True}  # fmt: skip

LANGUAGE = (
    Stranger("gemma2-padded", "language",
             _of("Gemma2", {**_TWO, "head_dim": 8, "sliding_window": 16})),
    Stranger("falcon-padded", "language", _of("Falcon", {"ffn_hidden_size": 64})),
    Stranger("olmo2-padded", "language", _of("Olmo2", _TWO)),
    Stranger("qwen2-full", "language", _of("Qwen2", _TWO, padded=False)),
    Stranger("mistral-items", "language", _items),
    Stranger("mistral-autocast", "language", _of("Mistral", _TWO, autocast=True)),
    Stranger("phi-bf16", "language", _of("Phi", bf16=True), "sgd"),
    Stranger("gpt-neox-padded", "language", _of("GPTNeoX")),
    Stranger("opt-dropout", "language",
             _of("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 64, "dropout": 0.1}), random=True),
    Stranger("bloom-padded", "language", _of("Bloom", {"n_layer": 4, "n_head": 4})),
    Stranger("stablelm-padded", "language", _of("StableLm", _TWO)),
    Stranger("starcoder2-padded", "language", _of("Starcoder2", _TWO)),
    Stranger("mixtral-router", "moe", _of("Mixtral", {**_TWO, "num_local_experts": 4,
             "output_router_logits": True})),
    Stranger("mixtral-plain", "moe", _of("Mixtral", {**_TWO, "num_local_experts": 4})),
    Stranger("qwen2-moe-router", "moe", _of("Qwen2Moe", _SMALL_MOE)),
    Stranger("mamba-padded", "language", _of("Mamba", {"state_size": 4})),
    Stranger("roberta-masked", "language", _of("Roberta", head="MaskedLM"), random=True),
    Stranger("deberta-masked", "language", _of("DebertaV2", _NO_DROPOUT, head="MaskedLM")),
    Stranger("albert-masked", "language",
             _of("Albert", {"embedding_size": 32}, head="MaskedLM"), "sgd"),
    Stranger("roberta-questions", "language", _questions, random=True),
    Stranger("electra-tags", "language", _tagged, random=True),
    Stranger("bart-padded", "language", _seq2seq("Bart", {"dropout": 0.0}), random=True),
    Stranger("marian-dropout", "language", _seq2seq("Marian", {"dropout": 0.1}), random=True),
    Stranger("pegasus-layerdrop", "language",
             _seq2seq("Pegasus", {"dropout": 0.0, "decoder_layerdrop": 0.2}), random=True),
    Stranger("qwen2-preferences", "language", _ranked),
    Stranger("llama-lora", "lora", _lora, random=True),
)  # fmt: skip
