"""A small U-Net in a pipeline of three stages: its skip connection jumps over the middle one.

Stages may begin at any module, and a value may be used by any later stage: what the encoder keeps
for the decoder travels from stage 0 to stage 2 by itself, its gradient the other way.

python examples/skip_connection.py [--lowering eager]
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROUNDING = 1e-5  # float32 keeps 7 digits, and the microbatches' sums are made in another order


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, wide: Tensor, deep: Tensor) -> Tensor:
        return self.last(torch.cat([wide, F.interpolate(deep, scale_factor=2.0)], dim=1))


class UNet(nn.Module):
    """Removes noise: the target is the clean picture."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = convolution(1, 8)
        self.middle = nn.Sequential(nn.AvgPool2d(2), convolution(8, 16), convolution(16, 8))
        self.decoder = Decoder()

    def forward(self, noisy: Tensor, clean: Tensor) -> dict[str, Tensor]:
        wide = self.encoder(noisy)
        picture = self.decoder(wide, self.middle(wide))
        return {"loss": F.mse_loss(picture, clean), "picture": picture.detach()}


def main() -> int:
    parser = argparse.ArgumentParser(description="A U-Net in a pipeline, beside eager.")
    parser.add_argument("--lowering", default="inductor", choices=("inductor", "eager"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = UNet()
    plain = copy.deepcopy(model)
    clean = F.avg_pool2d(torch.randn(7, 1, 20, 20), 5, stride=1)
    noisy = clean + 0.1 * torch.randn_like(clean)

    with tempfile.TemporaryDirectory() as folder:
        options = {"stages": ["middle", "decoder"], "microbatches": 3, "dump": folder}
        step = torch.compile(model, backend="fxpipe", options=options | vars(arguments))
        result = step(noisy, clean)
        result["loss"].backward()
        edges = edges_in(Path(folder))
    expected = plain(noisy, clean)
    expected["loss"].backward()

    print("stages: encoder, middle, decoder; 7 pictures in microbatches of 3, 2 and 2")
    print("what travels from stage to stage:")
    print("\n".join(f"  {edge}" for edge in edges))
    gradients = [relative(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters())]
    picture = relative(result["picture"], expected["picture"])
    print(f"loss {result['loss'].item():.6f}, eager's {expected['loss'].item():.6f}")
    print("largest relative difference from eager, for rounding alone:")
    print(f"  of the picture {picture:.1e}, of a gradient {max(gradients):.1e}")
    agrees = max(picture, *gradients) < ROUNDING
    print("the pipeline agrees with eager" if agrees else "the pipeline DIFFERS from eager")
    return 0 if agrees else 1


def edges_in(folder: Path) -> list[str]:
    """The dump of the pass that inserts communication lists the values that change stage."""
    text = next(folder.rglob("*-insert_communication.txt")).read_text()
    return [line for line in text.splitlines() if line.startswith("edge ")]


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


if __name__ == "__main__":
    sys.exit(main())
