"""Is a plan ever behind gradient checkpointing, by prediction? No GPU is needed.

    OMP_NUM_THREADS=1 python benchmarks/one_liner.py [NAME …] [--json FILE]

Models of repeated blocks, wide and not deep, for one GPU. Each is predicted plainly, and with
gradient checkpointing as people switch it on (`gradient_checkpointing_enable`, or
`torch.utils.checkpoint` around every block). Then `ss.plan` is asked for a lossless plan in the
peak of the second, and in 95% of it. Bytes are reserved ones; seconds are of the same costs,
nominal ones of one H200. The exit status is 1 if there is no plan for that peak, or a slower one.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shoestring as ss
from card_models.base import checkpointed, own_loss
from plan_holds import provenance
from shoestring.planning.cost import NOMINAL
from shoestring.planning.planner import Planner

_TEXT = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
         "intermediate_size": 4096, "vocab_size": 32000}  # fmt: skip
_IMAGES = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12,
           "intermediate_size": 3072}  # fmt: skip
_SPEECH = {
    "d_model": 512, "decoder_start_token_id": 1,
    **{f"{part}_layers": 4 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 8 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 2048 for part in ("encoder", "decoder")},
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "llama-gqa": ("LlamaForCausalLM", {**_TEXT, "num_key_value_heads": 4}, (8, 1024)),
    "modernbert": ("ModernBertForMaskedLM",
                   {**_TEXT, "intermediate_size": 2048, "vocab_size": 50368}, (16, 512)),
    "t5": ("T5ForConditionalGeneration",
           {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 4, "num_heads": 12,
            "decoder_start_token_id": 0}, (8, 512)),
    "vit": ("ViTForImageClassification", _IMAGES, (64, 3, 224, 224)),
    "swin": ("SwinForImageClassification", {"depths": [2, 2, 4, 2]}, (32, 3, 224, 224)),
    "convnext": ("ConvNextForImageClassification", {"depths": [2, 2, 4, 2]}, (32, 3, 224, 224)),
    "whisper": ("WhisperForConditionalGeneration", _SPEECH, (8, 80, 3000)),
    "mamba": ("MambaForCausalLM",
              {"hidden_size": 768, "num_hidden_layers": 3, "vocab_size": 32000}, (2, 128)),
    "mixtral": ("MixtralForCausalLM",
                {**_TEXT, "intermediate_size": 2048, "num_hidden_layers": 3,
                 "num_key_value_heads": 4, "num_local_experts": 4}, (4, 1024)),
    "bert": ("BertForMaskedLM", _TEXT, (16, 512)),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 1024, "n_layer": 6, "n_head": 16}, (8, 1024)),
    "segformer": ("SegformerForSemanticSegmentation", {}, (8, 3, 256, 256)),
}  # fmt: skip
SHARES = (1.0, 0.95)
Row = dict[str, Any]


def made(name: str, *, again: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """Model and batch without memory; `again` switches gradient checkpointing on."""
    import transformers

    kind, sizes, shape = MODELS[name]
    model_class = getattr(transformers, kind)
    with torch.device("meta"):
        config = model_class.config_class(**sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model = model_class(config).train()
        batch = _batch(kind, shape)
    if again and not checkpointed(model):
        raise ValueError(f"{name} cannot be checkpointed in one line")
    return model, batch


def _batch(kind: str, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    whole: dict[str, Any] = {"dtype": torch.int64}
    if kind.startswith("Whisper"):
        return {"input_features": torch.zeros(shape), "labels": torch.zeros(shape[0], 128, **whole)}
    if kind.startswith("Segformer"):
        labels = torch.zeros(shape[0], *shape[2:], **whole)
        return {"pixel_values": torch.zeros(shape), "labels": labels}
    if len(shape) == 4:
        return {"pixel_values": torch.zeros(shape), "labels": torch.zeros(shape[0], **whole)}
    return {"input_ids": torch.zeros(shape, **whole), "labels": torch.zeros(shape, **whole)}


def planner(name: str, *, again: bool) -> Planner:
    """For one GPU that need not be there."""
    model, batch = made(name, again=again)
    optimizer = torch.optim.AdamW(model.parameters())
    return Planner(
        model, batch, loss=own_loss, optimizer=optimizer, device="cuda", costs=NOMINAL["cuda"],
        allow="lossless",
    )  # fmt: skip


def rows_of(name: str) -> Iterator[Row]:
    """One for each share of the peak with checkpointing."""
    line, ours = planner(name, again=True).estimates.plain, planner(name, again=False)
    plain = ours.estimates.plain
    assert line.seconds is not None and plain.seconds is not None
    for share in SHARES:
        row: Row = {
            "name": name, "share": share, "plain_bytes": plain.needed_bytes,
            "plain_seconds": plain.seconds, "line_bytes": line.needed_bytes,
            "line_seconds": line.seconds, "plan": None, "seconds": None, "bytes": None,
        }  # fmt: skip
        try:
            plan = ours.plan(int(share * line.needed_bytes))
        except ss.BudgetError as error:
            row["plan"] = error.message
        else:
            predicted = plan.predicted
            row |= {"plan": plan.short(), "seconds": predicted.seconds,
                    "bytes": predicted.needed_bytes, "captured": predicted.captured}  # fmt: skip
        row["behind"] = row["seconds"] is None or row["seconds"] > line.seconds
        yield row


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="*", choices=[*MODELS, []], default=[])
    parser.add_argument("--json", metavar="FILE", help="write the rows there as well")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    print(f"{'model':<12}{'share':>6}{'plain GB':>9}{'ms':>7}{'line GB':>9}{'ms':>7}"
          f"{'plan GB':>9}{'ms':>7}  behind plan")  # fmt: skip
    for name in arguments.model or MODELS:
        for row in rows_of(name):
            rows.append(row)
            print(line_of(row), flush=True)
    if arguments.json:
        text = json.dumps({"made": provenance(), "rows": rows}, indent=1)
        Path(arguments.json).write_text(text + "\n")
    sys.exit(1 if any(row["behind"] and row["share"] == 1.0 for row in rows) else 0)


def line_of(row: Row) -> str:
    """Of the table."""
    found = row["seconds"] is not None
    size = f"{row['bytes'] / 1e9:>9.3f}{row['seconds'] * 1e3:>7.2f}" if found else f"{'-':>16}"
    return (
        f"{row['name']:<12}{row['share']:>6.2f}{row['plain_bytes'] / 1e9:>9.3f}"
        f"{row['plain_seconds'] * 1e3:>7.2f}{row['line_bytes'] / 1e9:>9.3f}"
        f"{row['line_seconds'] * 1e3:>7.2f}{size}  {'YES' if row['behind'] else 'no':<7}"
        f"{row['plan']}"
    )


if __name__ == "__main__":
    main()
