"""What the ranks of the tests of state run: train beside eager, then gather, save, load, clip."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import fxpipe
from tests.distributed.work import Refusal, error
from tests.numerics.models import CASES, MLP, ConvNet, pipelined, seeded

Batch = tuple[torch.Tensor, ...]
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def train(step: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        step(*batch).backward()
        optimizer.step()


def worst(actual: Any, expected: Any) -> float:
    """The largest relative error of the tensors in two nested dicts; inf where they differ."""
    if isinstance(expected, torch.Tensor):
        return error(actual.detach().double(), expected.detach().double())
    if not isinstance(expected, dict):
        return 0.0 if repr(actual) == repr(expected) else float("inf")
    if list(actual) != list(expected):
        return float("inf")
    return max((worst(actual[key], expected[key]) for key in expected), default=0.0)


# Clipping.


class Mixed(nn.Module):
    """A frozen layer, one in another precision, one that is not used, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.narrow = nn.Linear(6, 6, dtype=torch.float32)
        self.spare, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.first(x)))
        x = self.narrow(x.float()).double()
        return F.mse_loss(self.last(torch.tanh(x)), y)


def clip(rank: int, world_size: int) -> dict[str, list[float]]:
    """Per case: this rank's total norm, and the errors of norm and gradients beside eager's."""
    found = {}
    builds = {"gpt": CASES["gpt"].build, "mixed": Mixed, "frozen-rank": frozen_end}
    for name, build in builds.items():
        torch._dynamo.reset()
        batch = CASES["gpt" if name == "gpt" else "mlp"].inputs()
        model, twin = seeded(build), seeded(build)
        step = pipelined(model, stages=["last"] if name == "mixed" else 2)
        for norm_type in (2.0, 1.0, 3.0, float("inf")):
            model.zero_grad(), twin.zero_grad()
            step(*batch).backward(), twin(*batch).backward()
            total = fxpipe.clip_grad_norm_(step, 0.01, norm_type)
            expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type)
            gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
            mine = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found[f"{name} {norm_type}"] = [
                float(total),
                float("inf") if total.dtype != expected.dtype else error(total, expected),
                max((error(mine[n], gradients[n]) for n in mine), default=0.0),
            ]
    return found


def frozen_end() -> nn.Module:
    """The last stage has no gradients at all."""
    model = MLP()
    model.layers[2].requires_grad_(False)
    model.layers[3].requires_grad_(False)
    return model


def clip_infinite(rank: int, world_size: int) -> list[str]:
    """An inf on rank 0 alone: what each rank gets, refused or not."""
    model, step = trained_once("mlp")
    if rank == 0:
        next(iter(fxpipe.owned_parameters(model).values())).grad.view(-1)[0] = float("inf")
    told = [str(float(fxpipe.clip_grad_norm_(step, 1.0)))]
    try:
        fxpipe.clip_grad_norm_(step, 1.0, error_if_nonfinite=True)
    except RuntimeError as refusal:
        told.append(str(refusal))
    return told


def trained_once(name: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    model = CASES[name].model()
    step = pipelined(model, **options)
    step(*CASES[name].inputs()).backward()
    return model, step


def leave_out(rank: int, world_size: int, how: str) -> Refusal:
    """Rank 1 does not clip as rank 0 does; what is told, and when."""
    model, step = trained_once("mlp", timeout=3.0)
    start = time.monotonic()
    try:
        if rank == 0:
            fxpipe.clip_grad_norm_(step, 1.0)
        elif how == "steps":
            step(*CASES["mlp"].inputs())
        elif how == "sleeps":
            time.sleep(8)
        elif how == "fails":
            for parameter in fxpipe.owned_parameters(model).values():
                parameter.grad = torch.zeros_like(parameter).to_sparse()
            fxpipe.clip_grad_norm_(step, 1.0)
    except Exception as refusal:
        return Refusal(type(refusal).__name__, str(refusal), time.monotonic() - start)
    return Refusal("none", "the call went through", 0.0)


# State.


def gather(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Errors of the gathered states beside eager's, and what else the test looks at."""
    model, twin = seeded(GrowingNet), seeded(GrowingNet)
    step = pipelined(model, stages=["blocks.1"], microbatches=1)
    batch = CASES["convnet"].inputs()
    found: dict[str, Any] = {"before": worst(fxpipe.state_dict(step), twin.state_dict())}
    theirs = OPTIMIZERS["adamw"](twin.parameters())
    mine = OPTIMIZERS["adamw"](model.parameters())
    train(step, mine, batch, 2), train(twin, theirs, batch, 2)
    expected = twin.state_dict()
    found["stale"] = worst(model.state_dict(), expected)
    found["after"] = worst(fxpipe.state_dict(step), expected)
    found["of the plain module"] = worst(fxpipe.state_dict(model), expected)
    freed = fxpipe.free_unowned(step)
    whole = fxpipe.state_dict(model, cpu=True)
    found["after freeing"] = worst(whole, expected)
    found["rank 0 only"] = list(fxpipe.state_dict(model, rank0_only=True))
    fxpipe.save_safetensors(step, path)
    found["written"] = path.exists()

    changed = {name: value.clone() * 2 for name, value in whole.items()}
    fxpipe.load_state_dict(step, changed)
    found["loaded"] = worst(fxpipe.state_dict(step), changed)
    found["freed again"] = fxpipe.free_unowned(step)
    twin.load_state_dict(changed)
    train(step, mine, batch), train(twin, theirs, batch)
    found["trained on"] = worst(fxpipe.state_dict(step), twin.state_dict())
    found["freed"] = freed
    return found


class GrowingNet(ConvNet):
    """Batch norm in training, a weight with two names, and a layer that counts for nothing.

    Every rank reads the buffer `rates`, since the weights of the whole batch are added up first.
    """

    rates: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        first, last = self.blocks
        last.conv2.weight = first.conv1.weight  # type: ignore[union-attr]
        self.ignored = nn.Linear(3, 3)
        self.register_buffer("rates", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        self.ignored(features)
        return F.cross_entropy(self.head(features), labels, weight=self.rates)


def optimize(rank: int, world_size: int) -> dict[str, Any]:
    """Errors of the optimizers' states, gathered and loaded again, beside eager's."""
    found: dict[str, Any] = {}
    case = CASES["gpt"]
    for name, make in OPTIMIZERS.items():
        torch._dynamo.reset()
        model, twin = case.model(), case.model()
        step = pipelined(model)
        theirs, mine = make(groups_of(twin)), make(groups_of(model))
        train(step, mine, case.inputs(), 2), train(twin, theirs, case.inputs(), 2)
        expected: Any = get_optimizer_state_dict(twin, theirs)
        whole = fxpipe.optimizer_state_dict(step, mine)
        found[f"{name} gathered"] = worst(sorted_state(whole), sorted_state(expected))
        found[f"{name} rank 0 only"] = sorted(
            fxpipe.optimizer_state_dict(model, mine, rank0_only=True, cpu=True)
        )
        owned = fxpipe.owned_parameters(model)
        fresh = {
            "owned": make(groups_of(model, owned)),
            "all": make(groups_of(model)),
        }
        start = {k: v.clone() for k, v in fxpipe.state_dict(model).items()}
        for label, optimizer in fresh.items():
            fxpipe.load_state_dict(model, start)
            fxpipe.load_optimizer_state_dict(step, optimizer, whole)
            train(step, optimizer, case.inputs())
            if label == "owned":
                train(twin, theirs, case.inputs())
            found[f"{name} {label}"] = worst(fxpipe.state_dict(step), twin.state_dict())
            again: Any = fxpipe.optimizer_state_dict(step, optimizer)
            expected = get_optimizer_state_dict(twin, theirs)
            found[f"{name} {label} again"] = worst(sorted_state(again), sorted_state(expected))
    return found


def groups_of(model: nn.Module, owned: Any = None) -> list[dict[str, Any]]:
    """Biases and norms learn at another rate."""
    named = dict(model.named_parameters()) if owned is None else owned
    wide = [p for p in named.values() if p.dim() > 1]
    narrow = [p for p in named.values() if p.dim() < 2]
    return [{"params": wide}, {"params": narrow, "lr": 0.003}]


def sorted_state(state: Any) -> Any:
    groups = [{k: g[k] for k in sorted(g) if k != "params"} for g in state["param_groups"]]
    names = [sorted(group["params"]) for group in state["param_groups"]]
    values = {n: {k: v[k] for k in sorted(v)} for n, v in sorted(state["state"].items())}
    return {"state": values, "groups": dict(enumerate(groups)), "names": dict(enumerate(names))}


# Checkpoints.


def save_checkpoint(step: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    state = {
        "model": fxpipe.owned_state_dict(step),
        "optimizer": fxpipe.owned_optimizer_state_dict(step, optimizer),
    }
    dcp.save(state, checkpoint_id=folder)


def load_checkpoint(step: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    state = {
        "model": fxpipe.owned_state_dict(step),
        "optimizer": fxpipe.owned_optimizer_state_dict(step, optimizer, metadata),
    }
    dcp.load(state, storage_reader=reader)
    fxpipe.load_owned_optimizer_state_dict(step, optimizer, state["optimizer"])


def checkpoint(rank: int, world_size: int, given: Path, made: Path) -> dict[str, float]:
    """Three stages on two ranks: go on from `given` in two ways, and leave a checkpoint at `made`.

    `given` is of two steps; the errors are those after two more, beside four of eager.
    """
    case, make = CASES["gpt"], OPTIMIZERS["adamw"]
    twin = case.model()
    train(twin, make(twin.parameters()), case.inputs(), 4)
    expected = {k: v.clone() for k, v in twin.state_dict().items()}
    found = {}
    options: dict[str, Any] = {"stages": 3, "schedule": "interleaved-zb", "ranks": None}
    for label in ("before the first step", "after it", "freed"):
        torch._dynamo.reset()
        model = case.model()
        step = pipelined(model, **options)
        optimizer = make(model.parameters())
        if label != "before the first step":
            train(step, optimizer, case.inputs())
        if label == "freed":
            fxpipe.free_unowned(model)
            optimizer = make(fxpipe.owned_parameters(model).values())
        load_checkpoint(step, optimizer, given)
        train(step, optimizer, case.inputs(), 2)
        found[label] = worst(fxpipe.state_dict(step), expected)
    torch._dynamo.reset()
    model = case.model()
    step = pipelined(model, **options)
    optimizer = make(model.parameters())
    train(step, optimizer, case.inputs(), 2)
    save_checkpoint(step, optimizer, made)
    return found


# Scaling.


def scale(rank: int, world_size: int) -> dict[str, Any]:
    """Three steps with a scaler, the second with an inf on rank 0 alone; beside eager's."""
    model, twin = CASES["mlp"].model(), CASES["mlp"].model()
    step = pipelined(model)
    batch = CASES["mlp"].inputs()
    scales, skipped, runs = [], [], {}
    for name, (net, call) in {"ours": (model, step), "eager": (twin, twin)}.items():
        optimizer = OPTIMIZERS["sgd"](net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for k in range(3):
            optimizer.zero_grad()
            scaler.scale(call(*batch)).backward()
            first = net.get_parameter("layers.0.weight")
            if k == 1 and first.grad is not None:
                first.grad[0, 0] = float("inf")
            if name == "ours":
                skipped.append(fxpipe.agree_on_inf(scaler, optimizer))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        runs[name] = fxpipe.state_dict(net) if name == "ours" else net.state_dict()
    return {"scales": scales, "skipped": skipped, "error": worst(runs["ours"], runs["eager"])}


# Deferred.


def defer(rank: int, world_size: int) -> dict[str, Any]:
    """A model built without memory, then trained; beside one that was built as usual."""
    case = CASES["gpt"]
    twin, model = case.model(), seeded(lambda: fxpipe.deferred(case.build))
    step = pipelined(model)
    found: dict[str, Any] = {"at first": memory_of(model)}
    with torch.no_grad():
        step(*case.inputs())
    found["after the plan"] = memory_of(model)
    found["owned"] = memory_of_owned(model)
    found["start"] = worst(fxpipe.state_dict(step), twin.state_dict())
    mine, theirs = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, twin))
    train(step, mine, case.inputs(), 2), train(twin, theirs, case.inputs(), 2)
    found["trained"] = worst(fxpipe.state_dict(step), twin.state_dict())
    found["in the end"] = memory_of(model)
    return found


def memory_of(model: nn.Module) -> int:
    return sum(p.untyped_storage().size() for p in model.parameters())


def memory_of_owned(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in fxpipe.owned_parameters(model).values())


def everything(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    return {
        "clip": clip(rank, world_size),
        "clip infinite": clip_infinite(rank, world_size),
        "gather": gather(rank, world_size, path),
        "optimize": optimize(rank, world_size),
        "scale": scale(rank, world_size),
        "defer": defer(rank, world_size),
    }
