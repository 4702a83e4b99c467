"""Fine-tune a Hugging Face language model under a budget, the model unmodified.

    python examples/huggingface_finetune.py --budget '40 MB'

The model is built from a small configuration, so that nothing is downloaded; put
`AutoModelForCausalLM.from_pretrained("gpt2")` and your own tokens in its place.
"""

import argparse

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import shoestring as ss


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="40 MB")
    parser.add_argument("--steps", type=int, default=6)
    budget, steps = vars(parser.parse_args()).values()

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=64, vocab_size=1000, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, steps)
    tokens = torch.randint(1000, (16, 64))
    batch = {"input_ids": tokens, "labels": tokens}

    plan = ss.plan(model, batch, loss=loss, optimizer=optimizer, budget=budget, allow="lossless")
    print(plan)
    step = ss.apply(plan, model, optimizer, loss=loss)
    for number in range(steps):
        value = step(batch)
        scheduler.step()
        print(f"step {number + 1}: loss {float(value):.3f}")
    assert step.measured is not None
    print(f"measured {step.measured.peak_bytes / 1e6:.2f} MB of {budget}")


if __name__ == "__main__":
    main()
