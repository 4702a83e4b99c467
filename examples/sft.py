"""TRL's SFTTrainer within a budget: a class of two lines.

    python examples/sft.py --budget '30 MB'

Model and tokenizer are made here, so that nothing is downloaded.
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from shoestring.integrations.transformers import Budgeted


class BudgetSFT(Budgeted, SFTTrainer):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="30 MB")
    budget = parser.parse_args().budget

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(1000)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    rows = [{"input_ids": [(1 + n % 3) * k % 1000 for k in range(64)]} for n in range(48)]
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, per_device_train_batch_size=8, num_train_epochs=1, learning_rate=3e-3,
            logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            gradient_checkpointing=False, bf16=False,
        )  # fmt: skip
        trainer = BudgetSFT(
            model=LlamaForCausalLM(config), args=args, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, budget=budget,
        )  # fmt: skip
        trainer.train()
    for line in trainer.state.log_history[:-1]:
        print(f"step {line['step']}: loss {line['loss']:.3f}")
    print(trainer.step.plan)
    print(f"measured {trainer.step.measured.peak_bytes / 1e6:.2f} MB of {budget}")


if __name__ == "__main__":
    main()
