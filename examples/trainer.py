"""Hugging Face's Trainer within a budget: two lines change.

    python examples/trainer.py --budget '22 MB'

The model is built from a small configuration, so that nothing is downloaded. With `--lora` PEFT
trains adapters alone.
"""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from shoestring.integrations.transformers import BudgetTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="22 MB")
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if given.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    words = [torch.arange(64) * (1 + n % 3) % 1000 for n in range(48)]
    data = [{"input_ids": row, "labels": row} for row in words]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=8, num_train_epochs=1, learning_rate=3e-3,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = BudgetTrainer(model=model, args=args, train_dataset=data, budget=given.budget)
        trainer.train()
    for line in trainer.state.log_history[:-1]:
        print(f"step {line['step']}: loss {line['loss']:.3f}, norm {line['grad_norm']:.2f}")
    print(trainer.step.plan)
    print(f"measured {trainer.step.measured.peak_bytes / 1e6:.2f} MB of {given.budget}")


if __name__ == "__main__":
    main()
