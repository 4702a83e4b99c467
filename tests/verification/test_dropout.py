"""Dropout is turned off wherever a module keeps its probability, and nothing else is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shoestring.verification.dropout import turn_off_dropout


@dataclass(frozen=True)
class Config:
    attention_dropout: float = 0.3
    eps: float = 1e-5
    dropout_kind: str = "alpha"


class Path(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config, self.drop_prob, self.scale, self.dropping = Config(), 0.4, 2.0, True
        self.rest = nn.ModuleList(
            [nn.AlphaDropout(1), nn.MultiheadAttention(4, 2, dropout=0.1),
             nn.LSTM(4, 4, 2, dropout=0.2), nn.TransformerEncoderLayer(4, 2, 4)]
        )  # fmt: skip


def test_nothing_is_dropped() -> None:
    model = Path()
    turn_off_dropout(model)
    alpha, attention, lstm, layer = model.rest
    assert model.drop_prob == alpha.p == attention.dropout == lstm.dropout == 0
    assert layer.self_attn.dropout == layer.dropout1.p == 0
    assert (model.scale, model.dropping, model.training) == (2.0, True, True)
    assert model.config == Config(attention_dropout=0.0)
    before, x = torch.get_rng_state(), torch.randn(3, 2, 4, generator=torch.Generator())
    layer(lstm(attention(x, x, x)[0])[0] + alpha(x))
    assert torch.equal(before, torch.get_rng_state())
