# %% [markdown]
# # Profile a model and find its peak
#
# Where does the memory of a training step go? `ss.profile` answers without running the step: it
# traces it on fake tensors, which have shapes and types but no memory.

# %%
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, words=5_000, width=128, blocks=6):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


model, tokens = Language(), torch.randint(5_000, (16, 65))

# %% [markdown]
# `accounting="device"` asks for what PyTorch's allocator will show. You need no GPU for it:
# `device="cuda"` works on a laptop.

# %%
profile = ss.profile(model, tokens, loss=loss, optimizer="adamw", accounting="device")
print(profile)
print(f"peak in the {profile.peak_phase} pass, at {profile.peak_operation}")

# %% [markdown]
# The peak is where the loss is computed: 1,024 positions times 5,000 words. Which modules hold
# most at that instant? A notebook draws the profile by itself; a script writes a file.

# %%
for module, nbytes in list(profile.bytes_by_module.items())[:4]:
    print(f"{nbytes / 1e6:6.1f} MB  {module or '(outside of any module)'}")
profile.plot("profile.svg")

# %% [markdown]
# Check the prediction: `ss.measure` runs a real step and follows every tensor.

# %%
optimizer = torch.optim.AdamW(model.parameters())
measured = ss.measure(model, tokens, loss=loss, optimizer=optimizer)
print(f"predicted {profile.peak_bytes:,} bytes, measured {measured.peak_bytes:,}")
assert abs(profile.peak_bytes / measured.peak_bytes - 1) < 0.01

# %% [markdown]
# Now shrink it. The same call takes techniques to try. The logits are the peak, so computing the
# loss in chunks helps most.

# %%
given = {"loss": loss, "optimizer": "adamw", "accounting": "device"}
for technique in (ss.Checkpointing("residual-1"), ss.ChunkedLoss(), ss.OptimizerState(8)):
    smaller = ss.profile(model, tokens, **given, techniques=[technique])
    print(f"{smaller.peak_bytes / 1e6:6.1f} MB  {technique.short()}")
