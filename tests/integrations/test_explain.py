"""Which flags move a peak: each answer beside a profile of that very step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from cli.calling import call
from techniques.small_models import Attention


class Words(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 128), nn.Linear(128, 500)
        self.layers = nn.ModuleList(Attention(128, 0.0) for _ in range(6))
        if frozen:
            self.requires_grad_(False)
            self.layers[-1].requires_grad_(True)
            self.head.requires_grad_(True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def by_flag(found: ss.Explanation) -> dict[str, Any]:
    return {effect.flag: effect for effect in found.effects}


def test_every_peak_is_that_of_the_changed_step() -> None:
    model, words = Words(False), torch.zeros(16, 64, dtype=torch.int64)
    found = ss.explain(model, words, loss=loss, optimizer="adamw", device="cuda")

    def peak(batch: torch.Tensor = words, *techniques: ss.Technique) -> int:
        return ss.profile(
            model, batch, loss=loss, optimizer="adamw", accounting="device", device="cuda",
            techniques=techniques,
        ).peak_bytes  # fmt: skip

    effects = by_flag(found)
    assert found.peak_bytes == peak()
    recomputed = effects["recompute every block (gradient checkpointing)"]
    assert recomputed.peak_bytes == peak(words, ss.Checkpointing("residual-1")) < found.peak_bytes
    assert effects["half the batch"].peak_bytes == peak(words[:8])
    assert recomputed.saves_bytes == found.peak_bytes - recomputed.peak_bytes
    assert "gradient checkpointing" in str(found) and "saves" in str(found)


def test_an_offload_that_saves_nothing_is_named() -> None:
    """Few weights train: their state is small, and moving it costs time alone."""
    model, words = Words(True), torch.zeros(256, 64, dtype=torch.int64)
    found = ss.explain(model, words, loss=loss, optimizer="adamw", device="cuda")
    assert "optimizer state on the host" in found.useless
    assert "optimizer state on the host" in str(found) and "does nothing" in str(found)
    assert "half the batch" not in found.useless


def test_inputs_on_the_host_that_save_nothing_are_named() -> None:
    """Recomputed blocks' inputs are gone by the time gradients and update make the peak."""
    model, words = Words(False), torch.zeros(2, 64, dtype=torch.int64)
    flags = [ss.Checkpointing("residual-1"), ss.ActivationOffload("inputs")]
    found = ss.explain(model, words, loss=loss, optimizer="adamw", device="cuda", techniques=flags)
    effect = by_flag(found)["kept inputs on the host"]
    assert effect.on and effect.flag in found.useless


def test_a_flag_that_lets_the_step_be_captured_costs_nothing_by_that(tmp_path: Path) -> None:
    """Hugging Face makes masks while a graph is captured, which is not the flag's doing."""
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("peft", reason="needs peft")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512,
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ss.explain(f"hf:{tmp_path}", tokens=2048, lora="r=16")
    assert "8-bit optimizer state" in found.useless


def test_a_flag_that_is_on_is_told_by_the_peak_without_it() -> None:
    model, words = Words(False), torch.zeros(16, 64, dtype=torch.int64)
    plan = [ss.Checkpointing("residual-1")]
    found = ss.explain(model, words, loss=loss, optimizer="adamw", device="cuda", techniques=plan)
    plain = ss.profile(
        model, words, loss=loss, optimizer="adamw", accounting="device", device="cuda"
    )
    effect = by_flag(found)["residual-1"]
    assert effect.on and effect.peak_bytes == plain.peak_bytes and effect.saves_bytes > 0
    assert "on, off it would be" in str(found)


@pytest.mark.slow
def test_the_command_line() -> None:
    done = call("explain", "wrn-10-1", "--batch", 20, "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["effects"]
    assert call("explain", "hf:/nowhere").refused
    with pytest.raises(ss.InputError, match="explain does not take"):
        ss.explain(Words(False), torch.zeros(2, 2, dtype=torch.int64))
