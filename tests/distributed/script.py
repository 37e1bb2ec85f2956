"""A user's training script, as torchrun starts it: no process group, no word of ranks."""

import sys
from pathlib import Path

import torch

from tests.numerics.models import GPT, seeded, tokens_and_targets

model, twin = seeded(GPT), seeded(GPT)
step = torch.compile(
    model,
    backend="fxpipe",
    options={"microbatches": 3, "schedule": "zb-h1", "lowering": "eager"},
)
tokens, targets = seeded(tokens_and_targets)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plain = torch.optim.AdamW(twin.parameters(), lr=0.01)
for _ in range(3):
    loss, expected = step(tokens, targets), twin(tokens, targets)
    optimizer.zero_grad()
    plain.zero_grad()
    loss.backward()
    expected.backward()
    optimizer.step()
    plain.step()

error = abs(loss.item() - expected.item()) / expected.item()
rank = torch.distributed.get_rank()
line = f"{torch.distributed.get_backend()} {torch.distributed.get_world_size()} {error:.1e}"
Path(sys.argv[1], f"rank{rank}").write_text(line)
torch.distributed.destroy_process_group()
