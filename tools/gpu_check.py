"""What of fxpipe needs a GPU -> one table, and the same as JSON: numbers, launches, times, memory.

Needs torch (2.11 or newer) and a checkout, nothing installed beside them, and under six minutes on
one H200: what has not begun by then is left out, and says so.

python tools/gpu_check.py --json gpu-check.json
python tools/gpu_check.py --dry-run     # the same on a CPU, with a stand-in for CUDA's graphs
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
try:
    import fxpipe  # noqa: F401 - installed
except ImportError:
    sys.path.insert(0, str(ROOT / "tools"))
    import typing_tree

    typing_tree.main()
    sys.path.insert(0, str(typing_tree.TREE.parent))
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from fxpipe.backend import fxpipe as backend  # noqa: E402
from fxpipe.lowering import captured, runtime  # noqa: E402
from fxpipe.lowering.memory_plan import plan_memory  # noqa: E402
from fxpipe.lowering.stand_in import StandIn  # noqa: E402
from tests.cases import graphs  # noqa: E402

SECONDS = 330.0
SCHEDULES = {"gpipe": 2, "1f1b": 2, "zb-h1": 2, "interleaved-1f1b": 4, "zb-v": 4, "dualpipev": 4}
MODES = ("step", "task")
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
STEPS = 20


class Size(NamedTuple):
    """Of a GPT, and of its batch."""

    width: int
    depth: int
    rows: int
    length: int
    words: int = 512


@dataclass
class Setting:
    """What the checks run on."""

    device: str
    dry: bool
    lowering: str  # of what is timed; numbers are compared with "eager"
    small: Size
    large: Size


@dataclass
class Row:
    """One line of the table. `right` is None where a figure has no limit."""

    check: str
    figure: str
    right: bool | None
    seconds: float = 0.0


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(size.words, size.width)
        self.position = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.words)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(size: Size, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (size.rows, size.length)
    made = [torch.randint(0, size.words, shape, generator=generator) for _ in range(2)]
    return made[0].to(device), made[1].to(device)


def pipelined(model: nn.Module, lowering: str = "eager", **options: Any) -> Any:
    usual: dict[str, Any] = {"stages": 2, "ranks": 2, "microbatches": 4, "lowering": lowering}
    return torch.compile(model, backend=partial(backend, options=usual | options))


# The checks: each gives rows.


def equals_eager(setting: Setting, schedule: str, mode: str, dtype: torch.dtype) -> Iterator[Row]:
    """Four steps with new inputs and weights, gradients added up over two."""
    size = setting.small
    model = GPT(size).to(setting.device, dtype)
    twin = copy.deepcopy(model)
    step = pipelined(
        model, schedule=schedule, stages=SCHEDULES[schedule], cuda_graphs=mode
    )  # fmt: skip
    worst = 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin)]
    for number in range(6):
        losses = []
        for run in (step, twin):
            loss = run(*batch(size, setting.device, number))
            loss.backward()
            losses.append(float(loss.detach()))
            if number % 2:
                worst = max(worst, difference(model, twin)) if run is twin else worst
        if number % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        worst = max(worst, abs(losses[0] - losses[1]) / abs(losses[1]))
    name = f"{schedule}, {mode}, {str(dtype).removeprefix('torch.')}: error beside eager"
    yield Row(name, f"{worst:.1e}", worst < LIMITS[dtype])


def difference(model: nn.Module, twin: nn.Module) -> float:
    """Of all gradients, as one vector: relative to its length."""
    pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters())]
    ours, theirs = (torch.cat([g.flatten().double() for g in side if g is not None])
                    for side in zip(*pairs))  # fmt: skip
    return float((ours - theirs).norm() / theirs.norm())


def a_case(setting: Setting, number: int, mode: str) -> Iterator[Row]:
    """Raises AssertionError where it fails."""
    graphs.CHECKS[number](partial(pipelined_double, mode), setting.device)
    yield Row(f"case {number}, {mode}", "as eager", True)


def pipelined_double(mode: str, model: nn.Module, **options: Any) -> Any:
    return pipelined(model, cuda_graphs=mode, **options)


def never_waits(setting: Setting, mode: str) -> Iterator[Row]:
    step = pipelined(GPT(setting.small).to(setting.device), cuda_graphs=mode)
    inputs = batch(setting.small, setting.device)
    for _ in range(4):
        step(*inputs).backward()
    if setting.dry:
        yield Row(f"a step waits for the device, {mode}", "not looked at", None)
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield Row(f"a step waits for the device, {mode}", "no", True)


def host_time(setting: Setting, mode: str | bool) -> Iterator[Row]:
    """How long the host is busy with a step, and what it launches."""
    step = pipelined(GPT(setting.small).to(setting.device), setting.lowering, cuda_graphs=mode)
    inputs = batch(setting.small, setting.device)
    for _ in range(4):
        step(*inputs).backward()
    seconds = []
    for _ in range(STEPS):
        synchronize(setting)
        start = time.perf_counter()
        step(*inputs).backward()
        seconds.append(time.perf_counter() - start)
    label = f"cuda_graphs={mode!r}"
    yield Row(f"host time of a step, {label}", f"{1e6 * statistics.median(seconds):.0f} us", None)
    launches = launches_of(setting, lambda: step(*inputs).backward())
    yield Row(f"launches of a step, {label}", launches, None)


def launches_of(setting: Setting, work: Callable[[], Any]) -> str:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not setting.dry:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        work()
        synchronize(setting)
    counts = {event.key: event.count for event in profile.key_averages()}
    kernels = sum(n for key, n in counts.items() if "LaunchKernel" in key)
    whole = sum(n for key, n in counts.items() if "GraphLaunch" in key)
    return f"{kernels} kernels, {whole} graphs"


def step_times(setting: Setting, size: Size, label: str) -> Iterator[Row]:
    """Of a training without its optimizer, beside what torch compiles of the whole model."""
    device, inputs = setting.device, batch(size, setting.device)
    dtype = torch.float32 if setting.dry else torch.bfloat16
    plain = {"backend": "eager"} if setting.dry else {}
    reduced = plain if setting.dry else {"mode": "reduce-overhead"}
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "fxpipe": lambda m: pipelined(m, setting.lowering),
        "fxpipe, captured": lambda m: pipelined(m, setting.lowering, cuda_graphs="step"),
        "torch.compile": lambda m: torch.compile(m, **plain),
        "torch.compile, reduce-overhead": lambda m: torch.compile(m, **reduced),
    }
    for way, make in ways.items():
        model = GPT(size).to(device, dtype)
        step = make(model)

        def run(step: Any = step, model: nn.Module = model) -> None:
            model.zero_grad()
            step(*inputs).backward()

        milliseconds = time_of(setting, run)
        yield Row(f"{label}: {way}", f"{milliseconds:.2f} ms a step", None)
        torch._dynamo.reset()
    left_out = "left out: its stages send through a process group, each from a rank of its own"
    yield Row(f"{label}: torch.distributed.pipelining", left_out, None)


def time_of(setting: Setting, run: Callable[[], None]) -> float:
    for _ in range(4):
        run()
    synchronize(setting)
    seconds = []
    for _ in range(3 if setting.dry else STEPS):
        start = time.perf_counter()
        run()
        synchronize(setting)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def memory(setting: Setting) -> Iterator[Row]:
    """The peak of a captured step beside what the plans of its ranks say."""
    plans: list[Any] = []
    usual = captured.replay_of

    def noting(plan: Any, *others: Any) -> Any:
        plans.append(plan)
        return usual(plan, *others)

    model = GPT(setting.small).to(setting.device)
    runtime.replay_of = noting
    try:
        step = pipelined(model, cuda_graphs="step")
        inputs = batch(setting.small, setting.device)
        step(*inputs).backward()
    finally:
        runtime.replay_of = usual
    found = [plan_memory(plans[0].program, e.program) for e in plans[0].executors]
    planned = sum(plan.placed + plan.owned for plan in found)
    yield Row("memory of a step by its plan", f"{planned / 2**20:.2f} MiB", None)
    if setting.dry:
        return
    for _ in range(4):
        model.zero_grad()
        step(*inputs).backward()
    held = sum(p.nbytes for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    model.zero_grad()
    step(*inputs).backward()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    yield Row("memory of a step measured, with graphs' pool and .grad", f"{peak:.2f} MiB", None)


def synchronize(setting: Setting) -> None:
    if not setting.dry:
        torch.cuda.synchronize()


# All of them.


def checks(setting: Setting) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """The most telling first: those at the end are left out where time runs short."""
    for mode in MODES:
        yield f"1f1b, {mode}", partial(equals_eager, setting, "1f1b", mode, torch.float32)
        for number in graphs.CHECKS:
            yield f"case {number}, {mode}", partial(a_case, setting, number, mode)
        yield f"waits, {mode}", partial(never_waits, setting, mode)
    yield "memory", partial(memory, setting)
    for way in (False, *MODES):
        yield f"host time, {way}", partial(host_time, setting, way)
    yield "host-bound", partial(step_times, setting, setting.small, "host-bound GPT")
    yield "compute-bound", partial(step_times, setting, setting.large, "compute-bound GPT")
    for dtype in LIMITS:
        for schedule in SCHEDULES:
            for mode in MODES:
                if (schedule, dtype) != ("1f1b", torch.float32):
                    name = f"{schedule}, {mode}, {dtype}"
                    yield name, partial(equals_eager, setting, schedule, mode, dtype)


def run_checks(setting: Setting, seconds: float, only: str) -> list[Row]:
    start, rows = time.perf_counter(), list[Row]()
    for name, check in checks(setting):
        if only and only not in name:
            continue
        began = time.perf_counter()
        if began - start > seconds:
            rows.append(Row(name, "left out: out of time", None))
            print(line_of(rows[-1]), flush=True)
            continue
        try:
            made = list(check())
        except Exception as error:
            made = [Row(name, f"{type(error).__name__}: {str(error).splitlines()[0]}", False)]
        torch._dynamo.reset()
        for row in made:
            row.seconds = round(time.perf_counter() - began, 1)
            print(line_of(row), flush=True)
        rows += made
    return rows


def line_of(row: Row) -> str:
    mark = {True: "right", False: "WRONG", None: ""}[row.right]
    return f"| {row.check} | {row.figure} | {mark} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with a stand-in")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="the checks whose names hold this text")
    given = parser.parse_args()
    small, large = Size(128, 8, 8, 64), Size(1024, 8, 32, 1024)
    setting = Setting("cuda", False, "inductor", small, large)
    if given.dry_run:
        tiny = Size(16, 4, 4, 4, 16)
        setting = Setting("cpu", True, "eager", tiny, tiny)
        captured.make_device = lambda *_: StandIn()
    elif not torch.cuda.is_available():
        print("torch finds no GPU with CUDA here; --dry-run goes through the same on a CPU")
        return 2
    name = "cpu, dry run" if given.dry_run else torch.cuda.get_device_name()
    about = f"{name}, torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{about}, {time.strftime('%Y-%m-%d')}\n\n| check | figure | |\n| --- | --- | --- |")
    rows = run_checks(setting, given.seconds, given.only)
    wrong = sum(row.right is False for row in rows)
    print(f"\n{len(rows)} rows, {wrong} of them wrong, {sum(r.right is True for r in rows)} right")
    if given.json:
        given.json.write_text(json.dumps({"on": about, "rows": list(map(asdict, rows))}, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
