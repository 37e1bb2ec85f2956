"""An MLP, trained in a pipeline of two stages inside this process, beside the same MLP in eager.

python examples/mlp.py
python examples/mlp.py --lowering eager --dump dumps     without Inductor; the passes as text
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.schedules import build

SCHEDULE = {"stages": 2, "microbatches": 3}
ROUNDING = 1e-5  # float32 keeps 7 digits, and the microbatches' sums are made in another order


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


def main() -> int:
    parser = argparse.ArgumentParser(description="An MLP in a pipeline, beside eager.")
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--dump", help="folder for the program after every pass")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    x, y = torch.randn(12, 8), torch.randn(12, 4)

    options = SCHEDULE | {"schedule": "zb-h1", **vars(arguments)}
    step = torch.compile(model, backend="fxpipe", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)

    print("what the two ranks do in a step (F: forward, I and W: the halves of backward):")
    print(build("zb-h1", **SCHEDULE))
    print("\nstep   loss       eager's    largest relative difference of a gradient")
    agrees = True
    for number in range(1, 6):
        loss = step(x, y)
        loss.backward()
        plain_loss = plain(x, y)
        plain_loss.backward()
        difference = worst_gradient(model, plain)
        print(f"{number:>4}   {loss.item():.6f}   {plain_loss.item():.6f}   {difference:.1e}")
        agrees &= difference < ROUNDING
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
    print("the pipeline agrees with eager" if agrees else "the pipeline DIFFERS from eager")
    return 0 if agrees else 1


def worst_gradient(model: nn.Module, plain: nn.Module) -> float:
    pairs = zip(model.parameters(), plain.parameters())
    return max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs)


if __name__ == "__main__":
    sys.exit(main())
