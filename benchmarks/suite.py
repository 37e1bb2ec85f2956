"""fxpipe, torch.distributed.pipelining and one process on the same GPT -> what was asked, and is.

Two gloo ranks, started once, with one thread and one core each. All contestants live in these two
processes, with the same parameters, batch and microbatches, and run a step or a few in turn, in
another order every round, so that whatever else the machine does falls on all of them. A step is
zero_grad, all microbatches forward and backward, and SGD; its time is that of the slower rank. A
figure is a ratio within one run: the median over rounds of (time / other's time in that round).

Parts: steps (times, no-communication bound, bubbles, bytes sent), compile (first steps in new
processes, caches empty and kept), memory (live activations; resident peaks in new processes), host
(CPU beside the bare tasks), split (I + W against B), single (one rank against Inductor alone).

python benchmarks/suite.py --preset medium small --json results.json --picture results.png
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bars
import torch
import torch.multiprocessing as mp
from contestants import NUM_RANKS, PEERS_WITH_COMPILED_STAGES
from gpt import PRESETS
from ranks import work
from starts import Start, measure

from fxpipe.schedules import families

PARTS = ("steps", "compile", "memory", "host", "split", "single")
SCHEDULES = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved-1f1b",
    "interleaved-zb",
    "zb-v",
    "dualpipev",
)
# A minute or two, and no C++ compiler: that everything runs, not how fast.
QUICK = {
    "preset": ["tiny"],
    "schedules": ["1f1b", "zb-h1", "zb-v"],
    "lowerings": ["eager"],
    "compiler": "aot_eager",
    "warm": 1,
}


def main() -> None:
    arguments = parse(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        arguments.cache = arguments.cache or f"{folder}/cache"
        about = facts(arguments)
        print(describe(about), flush=True)
        started = time.perf_counter()
        results = {"about": about, "presets": {}, "starts": {}}
        if set(arguments.parts) - {"compile"} and any("deep" not in p for p in arguments.preset):
            results["presets"] = in_the_group(arguments, folder)
        if {"compile", "memory"} & set(arguments.parts):
            results["starts"] = NewProcesses(arguments, folder).measure()
        about["load_after"], about["seconds"] = os.getloadavg()[0], time.perf_counter() - started
    found = bars.bars_of(results)
    results["bars"] = [bar.as_json() for bar in found]
    show(results, found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, default=str) + "\n")
    if arguments.picture:
        from picture import draw

        draw(results, arguments.picture)


def parse(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    presets = [name for name in PRESETS if name != "deep-12"]
    parser.add_argument("--preset", nargs="+", default=["medium", "small"], choices=presets)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=families())
    parser.add_argument("--lowerings", nargs="+", default=["inductor", "eager"])
    parser.add_argument("--rounds", type=int, help="turns of each contestant")
    parser.add_argument("--steps", type=int, help="steps of a contestant in a round")
    parser.add_argument("--warm", type=int, default=2, help="steps before the first round")
    parser.add_argument("--starts", type=int, default=1, help="runs of each fresh start")
    parser.add_argument("--compiler", default="inductor", help="torch.compile's, for the others")
    parser.add_argument("--cache", help="folder for what is compiled, to keep; else a new one")
    parser.add_argument("--json", help="a file for all that was measured")
    parser.add_argument("--picture", help="a file for a picture, such as results.png")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model, to see that all parts run"
    )
    arguments = parser.parse_args(given)
    if arguments.quick:
        vars(arguments).update(QUICK)
    return arguments


def in_the_group(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    results = mp.get_context("spawn").SimpleQueue()
    context = mp.spawn(work, (f"{folder}/store", arguments, results), nprocs=NUM_RANKS, join=False)
    # A pipe holds less than the results: they must be read while the ranks still run.
    while results.empty():
        if context.join(timeout=1.0):
            break
    found: dict[str, Any] = results.get()
    while not context.join():
        pass
    return found


class NewProcesses:
    """What fresh processes show: name -> {"start": what, "runs": [...]}.

    One after another, since each wants its cores. The process that starts with a kept cache shows
    its memory as well.
    """

    def __init__(self, arguments: argparse.Namespace, folder: str) -> None:
        self.arguments, self.folder = arguments, folder
        self.found: dict[str, Any] = {}
        self.warm: dict[Start, Any] = {}

    def measure(self) -> dict[str, Any]:
        if "compile" in self.arguments.parts:
            # Inductor keeps its precompiled header beside all caches; nobody's time counts it.
            measure(Start("one process", "tiny", self.arguments.compiler), f"{self.folder}/header")
        for number in range(self.arguments.starts):
            self.warm.clear()
            for preset in self.arguments.preset:
                if "compile" in self.arguments.parts and preset != "small":
                    self.compile(preset, f"{self.folder}/{preset}-{number}")
                if "memory" in self.arguments.parts and preset in ("medium", "tiny"):
                    self.memory(preset)
        return self.found

    def run(self, name: str, start: Start, cache: str) -> None:
        entry = self.found.setdefault(name, {"start": start._asdict(), "runs": []})
        entry["runs"].append(measure(start, cache))

    def compile(self, preset: str, fresh: str) -> None:
        schedule = "interleaved-1f1b" if preset == "deep" else "1f1b"
        own = Start("fxpipe", preset, self.arguments.lowerings[0], schedule)
        self.run(f"{preset} cold", own, f"{fresh}-own")
        self.run(f"{preset} warm", own, f"{fresh}-own")
        self.warm[own] = self.found[f"{preset} warm"]["runs"][-1]
        if preset == "deep":
            self.run("deep-12 cold", own._replace(preset="deep-12"), f"{fresh}-12")
        else:
            one = Start("one process", preset, self.arguments.compiler)
            self.run(f"{preset} one process cold", one, f"{fresh}-one")

    def memory(self, preset: str) -> None:
        for schedule, ours, theirs in self.memory_pairs():
            for kind, how in (("fxpipe", ours), ("torch", theirs)):
                start = Start(kind, preset, how, schedule)
                name = f"{preset} {schedule} {theirs} memory {kind}"
                if start in self.warm:
                    entry = self.found.setdefault(name, {"start": start._asdict(), "runs": []})
                    entry["runs"].append(self.warm[start])
                else:
                    self.run(name, start, self.arguments.cache)
                    self.warm[start] = self.found[name]["runs"][-1]

    def memory_pairs(self) -> list[tuple[str, str, str]]:
        """(schedule, lowering, torch's stages): compiled beside compiled, where torch allows it."""
        compiler, lowerings = self.arguments.compiler, self.arguments.lowerings
        pairs = []
        for schedule in ("1f1b", "interleaved-zb"):
            if schedule in self.arguments.schedules:
                if schedule in PEERS_WITH_COMPILED_STAGES:
                    pairs.append((schedule, lowerings[0], compiler))
                pairs.append((schedule, lowerings[-1], "eager"))
        return pairs


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, and what the machine is and does at the start."""
    given = {name: value for name, value in vars(arguments).items() if name != "cache"}
    return given | {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "busy_before": busy_share(1.0),
    }


def busy_share(seconds: float) -> float | None:
    """The part of all cores that was at work in a time in which this process sleeps."""
    if not Path("/proc/stat").exists():
        return None

    def ticks() -> tuple[int, int]:
        numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    (all_before, idle_before), _ = ticks(), time.sleep(seconds)
    all_after, idle_after = ticks()
    spent = max(1, all_after - all_before)
    return 1 - (idle_after - idle_before) / spent


def describe(about: dict[str, Any]) -> str:
    busy, load = about["busy_before"], about["load_before"]
    others = "unknown" if busy is None else f"{100 * busy:.0f} % of the cores"
    quiet = busy is None or busy < 0.1
    return (
        f"torch {about['torch']}, {about['cores']} cores, {NUM_RANKS} ranks; at the start: load "
        f"{load:.2f}, others at work on {others}"
        f"{'' if quiet else ': NOT QUIET, expect a wide spread'}.\n"
        f"Times are of this machine in this run: only their ratios say something."
    )


def show(results: dict[str, Any], found: Sequence[bars.Bar]) -> None:
    about = results["about"]
    for preset, measured in results["presets"].items():
        rounds, steps = measured["rounds"], measured["steps"]
        losses = " to ".join(f"{loss:.6f}" for loss in measured["losses"] or ())
        print(
            f"\n{preset}: {rounds} rounds of {steps} steps, {measured['microbatches']} "
            f"microbatches; the loss of every step: {losses}\n"
        )
        print(bars.steps_table(measured, about["lowerings"][0]))
        if measured.get("sent") or measured.get("live"):
            print(f"\n{bars.memory_table(measured)}")
    if results["starts"]:
        print(f"\nnew processes\n\n{bars.starts_table(results['starts'])}")
    print(f"\n{bars.bars_table(found)}\n")
    met = sum(bar.met for bar in found)
    print(
        f"{met} of {len(found)} bars met; {about['seconds']:.0f} s; "
        f"load {about['load_before']:.2f} before, {about['load_after']:.2f} after"
    )


if __name__ == "__main__":
    main()
