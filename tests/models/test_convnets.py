"""Convolutional networks as torchvision writes them, BatchNorm in training included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, CLASSES = 7, 5


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * 2
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = nn.Sequential(Bottleneck(4, 4, 1), Bottleneck(8, 4, 1))
        self.layer2 = nn.Sequential(Bottleneck(8, 6, 2), Bottleneck(12, 6, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, channels // 2, 1)
        self.fc2 = nn.Conv2d(channels // 2, channels, 1)
        self.activation, self.scale_activation = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        return self.scale_activation(scale) * x


class InvertedResidual(nn.Module):
    """Wider, depthwise, narrower; only a block that keeps its shape has a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, squeeze: bool) -> None:
        super().__init__()
        wide = inputs * 2
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(True),
            nn.Conv2d(wide, wide, 3, stride, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
        ]  # fmt: skip
        layers += [SqueezeExcitation(wide)] if squeeze else []
        layers += [nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.use_res_connect else self.block(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU6(True),
            InvertedResidual(4, 4, 1, squeeze=False), InvertedResidual(4, 6, 2, squeeze=True),
            InvertedResidual(6, 6, 1, squeeze=True),
        )  # fmt: skip
        self.classifier = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(x.reshape(x.shape[0], -1))


class Classifier(nn.Module):
    def __init__(self, body: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body()
        self.double()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.body(x), labels, label_smoothing=0.1)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, 3, 16, 16, dtype=torch.float64)
    return x, torch.tensor([1, 4, 0, -100, 2, 3, 3])


def one_after_another(model: nn.Module, x: Tensor, labels: Tensor, rows: tuple[int, ...]) -> Tensor:
    """The loss of a loop over microbatches, each weighted by its count of labels."""
    counted = (labels != -100).sum()
    total = torch.zeros((), dtype=x.dtype)
    for part, own in zip(x.split(rows), labels.split(rows)):
        loss = model(part, own) * (own != -100).sum() / counted
        loss.backward()
        total += loss.detach()
    return total


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "resnet": (ResNet, 3),
    "resnet by path": (ResNet, ["body.layer1", "body.layer2"]),
    "mobilenet": (MobileNet, 3),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [True, False], ids=["training", "frozen statistics"])
def test_gradients_and_statistics_are_those_of_a_loop(name: str, training: bool) -> None:
    body, stages = CASES[name]
    model = Classifier(body).train(training)
    twin = copy.deepcopy(model)
    options = {"stages": stages, "microbatches": 2, "schedule": "zb-h1", "lowering": "eager"}
    step = torch.compile(model, backend="fxpipe", options=options)
    for _ in range(2):
        loss = step(*batch())
        loss.backward()
        expected = one_after_another(twin, *batch(), rows=(4, 3) if training else (7,))
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-10, atol=0)
    found = dict(model.named_parameters())
    for parameter, value in twin.named_parameters():
        torch.testing.assert_close(found[parameter].grad, value.grad, rtol=1e-9, atol=1e-12)
    for (_, actual), (_, buffer) in zip(model.named_buffers(), twin.named_buffers()):
        torch.testing.assert_close(actual, buffer, rtol=1e-10, atol=1e-14)
