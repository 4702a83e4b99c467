# %% [markdown]
# # Certify a plan
#
# Does planned training compute what plain training computes? `ss.verify` trains two copies of the
# model from the same state on the same batches, one plainly and one by the plan, and compares.

# %%
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
batches = [(torch.randn(16, 32), torch.randint(4, (16,))) for _ in range(3)]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


given = {"loss": loss, "optimizer": optimizer}

# %% [markdown]
# Recomputation claims to be equal: no bit differs, dropout masks and random stream included.

# %%
certificate = ss.verify([ss.Checkpointing("every-2")], model, batches, **given)
print(certificate)
assert certificate.ok

# %% [markdown]
# Each row says what was claimed and what was found. 16 bits claim less: `near`, with a bound.

# %%
certificate = ss.verify([ss.Precision("bf16")], model, batches, **given)
print(certificate)
assert certificate.ok

# %% [markdown]
# A mistake is caught. This loss is a sum over the batch divided by a fixed 16, so microbatches of
# 4 that weight it as a mean get gradients that are four times too small.


# %%
def summed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 16


wrong = ss.verify(
    [ss.Microbatching(4, units="examples")], model, batches, loss=summed, optimizer=optimizer
)
print(wrong)
assert not wrong.ok

# %% [markdown]
# Without `units`, `Microbatching(4)` tests the loss, finds that it is a sum, and is right.
# Model and optimizer have not changed: `verify` works on copies.

# %%
right = ss.verify([ss.Microbatching(4)], model, batches, loss=summed, optimizer=optimizer)
assert right.ok, right
