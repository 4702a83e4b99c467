# %% [markdown]
# # Write a technique of your own in 60 lines
#
# A technique is one frozen dataclass. It says what it does to a prediction (`predict`), what it
# does to a real step (`apply`), how close it stays to plain training (`claims`), and what the
# planner may try (`offers`). Everything else follows: budgets, certificates, plan files.
#
# This one stores the momentum of SGD in bf16: 2 bytes a parameter instead of 4.

# %%
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.techniques.claims import MOVED, Claim
from shoestring.techniques.offers import Offer


@ss.register
@dataclass(frozen=True)
class ShortMomentum(ss.Technique):
    """Store the momentum of SGD in bf16."""

    name: ClassVar[str] = "short_momentum"
    order: ClassVar[int] = 25  # after what a tensor is (10) and its type (20)

    def short(self):
        return "bf16 momentum"

    def predict(self, trace):
        parameters = tuple(replace(p, state_dtype=torch.bfloat16) for p in trace.parameters)
        return replace(trace, parameters=parameters)

    def check(self, setup):  # refuse before anything changes
        groups = setup.optimizer.param_groups
        if type(setup.optimizer) is not torch.optim.SGD or any(g["nesterov"] for g in groups):
            raise ss.InputError("bf16 momentum needs SGD without Nesterov")

    def apply(self, setup):
        setup.update = lambda: self.update(setup.optimizer)

    @torch.no_grad()
    def update(self, optimizer):
        for hook in optimizer._optimizer_step_pre_hooks.values():  # as optimizer.step() does
            hook(optimizer, (), {})
        for group in optimizer.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = optimizer.state[parameter], parameter.grad
                gradient.add_(parameter, alpha=group["weight_decay"])
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = gradient.to(torch.bfloat16)
                else:
                    state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
                parameter.add_(state["momentum_buffer"], alpha=-group["lr"])

    def claims(self, at):  # bf16 has 8 bits: each of a few updates rounds by at most 1/256
        why = "momentum is rounded to 16 bits"
        yield Claim(ss.Level.NEAR, why, ("loss", *MOVED), bound=0.02)

    @classmethod
    def offers(cls, context):
        yield Offer(cls(), "momentum is rounded to 16 bits")


# %% [markdown]
# Predict it, measure it, certify it.

# %%
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batch = torch.randn(16, 256), torch.randint(10, (16,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


given = {"loss": loss, "optimizer": optimizer}
plain = ss.profile(model, batch, **given, accounting="device")
mine = [ShortMomentum()]
short = ss.profile(model, batch, **given, accounting="device", techniques=mine)
print(f"{plain.peak_bytes:,} bytes plain, {short.peak_bytes:,} with bf16 momentum")
assert short.peak_bytes < plain.peak_bytes

certificate = ss.verify(mine, model, [batch], **given)
print(certificate)
assert certificate.ok

# %% [markdown]
# The planner knows the technique now. Your own package registers it by an entry point:
# `docs/adding-a-technique.md` has the two lines, and the rest of the contract.

# %%
step = ss.apply(mine, model, optimizer, loss=loss)
step(batch)
print(step.measure(batch).peak_bytes, "bytes measured")
assert optimizer.state[model[0].weight]["momentum_buffer"].dtype is torch.bfloat16
