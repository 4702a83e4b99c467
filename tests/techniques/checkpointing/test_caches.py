"""A layer that runs again appends to no cache of keys and values."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from shoestring import Checkpointing, apply
from shoestring.errors import InputError
from shoestring.step.predict import predict_step

CONFIG = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 20, "n_positions": 16}


def build() -> tuple[GPT2LMHeadModel, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, bos_token_id=0, eos_token_id=0))
    return model, torch.randint(0, 20, (3, 8))


def test_the_second_pass_has_keys_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    plain = DynamicCache.update

    def watched(self: DynamicCache, *args: object, **kwargs: object) -> object:
        out = plain(self, *args, **kwargs)
        lengths.append(out[0].shape[-2])
        return out

    monkeypatch.setattr(DynamicCache, "update", watched)
    model, tokens = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apply(
        [Checkpointing("residual-1")],
        model,
        optimizer,
        loss=lambda m, x: m(input_ids=x, labels=x).loss,
    )
    step(tokens)
    assert set(lengths) <= {8}, "an appended cache is twice as long"
    assert model.config.use_cache, "text is still generated with a cache"


def test_a_cache_that_was_asked_for_is_refused() -> None:
    model, tokens = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = apply(
        [Checkpointing("residual-1")],
        model,
        optimizer,
        loss=lambda m, x: m(input_ids=x, labels=x, use_cache=True).loss,
    )
    with pytest.raises(InputError, match="cache of keys and values"):
        step(tokens)


def test_a_trace_masks_what_training_masks() -> None:
    """Llama looks for several sequences in a row, and fake tensors could not show there is one."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=20,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )
    tokens = torch.randint(0, 20, (8, 32))
    chosen = [Checkpointing.parse("keep, cheap, keep")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: LlamaForCausalLM, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = m(input_ids=x, labels=x).loss
        return found

    predicted = predict_step(chosen, model, tokens, loss=loss, optimizer=optimizer)
    step = apply(chosen, model, optimizer, loss=loss)
    step(tokens)
    step(tokens)
    assert step.measure(tokens).peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.002)
