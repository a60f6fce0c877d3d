"""Peak memory and step time of sketched linear layers, beside exact recomputation and beside both together.

    PYTHONPATH=src python benchmarks/sketch_memory.py --workers 12 --deadline 280
    PYTHONPATH=src python benchmarks/sketch_memory.py --device cpu --tiny --workers 0 --out rows.jsonl
    python benchmarks/sketch_memory.py --table              # the tables, from the rows that are there

The step is one of fine-tuning RoBERTa-base (random weights, dropout on, two classes) at the batches that
Bershatsky et al. 2022 report, on sequences without padding: forward, backward and the update of AdamW. Its
state counts in every peak, with weights and gradients: a peak of training, as the paper's. float32 is without
TF32, torch's default; in bfloat16 weights, gradients and AdamW's state are bfloat16, too. Attention is
torch's fused one; beside it, for what the paper could save, one that keeps its weights as in 2022.

Sketched are the linear layers of the encoder, except that after attention where attention is fused: its
backward keeps its output, so a sketch of it would come on top.

"eager" runs the model as it is, and caps with the executor "eager"; "compiled" uses torch.compile, and caps
with "inductor"; "graph" replays the eager step as one CUDA graph, without caps. A cap "as strided 10%" has
for its budget the peak which that sketch reached in the same way of running, and "both" 80 % of it. Times are
medians; `plain_milliseconds` in a row is the plain eager step of the same process. `kernel_milliseconds` is
the time of a step's kernels alone: in bfloat16 these steps are so short that launching their kernels takes
longer than running them, unless they are one graph.

A process for each batch, dtype and way of running compiles while others do; measuring goes in turns. Rows
that the results file has are not made again, unless they failed, so a run can be stopped and continued.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import headtohead_others
import lowtide
from commit import commit
from headtohead_turn import Turn, measure_prices_in
from headtohead_work import of_plan, refusal
from row_files import append
from sketch_memory_results import CASES, RESULTS, Group, Row, Way, groups, key, read, tables, ways
from sketch_memory_steps import Training, measured, prepared

SECONDS = 0.5
"""Time that the timed steps of a row take, about; there are at least four."""


class Worker:
    """One group; rows go to the file as they are done."""

    def __init__(self, group: Group, args: argparse.Namespace) -> None:
        self.group, self.args = group, args
        self.seconds = 0.0 if args.tiny else SECONDS
        self.turn = Turn()
        measure_prices_in(self.turn)
        import transformers  # noqa: F401  # which takes seconds, before others wait for this process

        with self.turn:
            self.stand = Training.of(group, args.device, tiny=args.tiny)
            with headtohead_others.standing_still():
                self.plain = measured(self.stand, self.stand.model, self.seconds)
            self.stand.tidy()

    def work(self, wanted: list[Way], until: float) -> None:
        for way in wanted:
            budget = self.budget(way) if way.cap else None
            if time.time() >= until or (way.cap and budget is None):
                continue
            row = {**self.group._asdict(), **way._asdict(), **self.attempt(way, budget), **self.facts()}
            append(row, self.args.out)
            say(row)

    def attempt(self, way: Way, budget: int | None) -> Row:
        """What is found, or why nothing is. Where others may have had the memory, once more without them."""
        try:
            return self.measure(way, budget)
        except Exception as error:
            row = refusal(error)
        if "out of memory" in row.get("error", ""):
            try:
                with self.turn:
                    return self.measure(way, budget)
            except Exception as error:
                row = refusal(error)
        return row

    def measure(self, way: Way, budget: int | None) -> Row:
        gc.collect()
        self.stand.tidy()
        start, waited = time.perf_counter(), self.turn.waited
        with prepared(self.stand, self.group, way, budget) as call:
            with self.turn.beside_others():
                self.stand.step(call)
                self.stand.finish()
            seconds = time.perf_counter() - start - (self.turn.waited - waited)
            self.stand.tidy()
            with self.turn:
                with headtohead_others.standing_still():
                    row = measured(self.stand, call, self.seconds)
                self.stand.tidy()
            plan = lowtide.plan_of(self.stand.model) if budget is not None else None
        return {**row, "setup_seconds": round(seconds, 2), **of_plan(plan)}

    def budget(self, way: Way) -> int | None:
        """From the row that the budget is taken of; None where there is none."""
        found = read(self.args.out).get((self.group, way.budget_of), {})
        return int(found["peak"] * way.share) if "peak" in found else None

    def facts(self) -> Row:
        cuda = self.stand.device.type == "cuda"
        return {
            "plain_milliseconds": self.plain["milliseconds"],
            "plain_kernel_milliseconds": self.plain.get("kernel_milliseconds"),
            "resident": sum(part.numel() * part.element_size() for part in self.stand.held),
            "device": torch.cuda.get_device_name() if cuda else platform.machine(),
            "torch": torch.__version__,
            "commit": commit(),
            **({"tiny": True} if self.args.tiny else {}),
        }


def say(row: Row) -> None:
    group, way = key(row)
    what = f"{row['peak'] / 2**20:.0f} MiB {time_text(row)}" if "peak" in row else str(row.get("error", row))
    print(" ".join([*group, way.sketch, way.cap, what]), flush=True)


def time_text(row: Row) -> str:
    times = f"{row['milliseconds']:.1f} ms, plain {row['plain_milliseconds']:.1f} ms"
    return f"{times}, set-up {row['setup_seconds']:.0f} s"


def run(wanted: dict[Group, list[Way]], args: argparse.Namespace) -> None:
    """A process for each group, several at a time, until the deadline."""
    until = time.time() + args.deadline
    if args.workers == 0:
        for group, some in wanted.items():
            Worker(group, args).work(some, until)
        return
    waiting, running = list(wanted), []
    try:
        while (waiting or running) and time.time() < until:
            if any(process.poll() for process in running):
                headtohead_others.go_on()
            running = [process for process in running if process.poll() is None]
            while waiting and len(running) < args.workers:
                running.append(start(waiting.pop(0), until - time.time(), args))
            time.sleep(0.2)
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started


def start(group: Group, seconds: float, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--workers", "0", "--device", args.device, "--out", str(args.out)]
    for name in Group._fields:
        command += [f"--{name}", getattr(group, name)]
    command += ["--sketch", ",".join(args.sketch)] if args.sketch else []
    command += ["--deadline", str(seconds), *(["--tiny"] if args.tiny else [])]
    threads = str(max(2 * (os.cpu_count() or 1) // args.workers, 1))  # about half of them compile
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ, **headtohead_others.naming()}
    return subprocess.Popen(command, env=environment, start_new_session=True)


def choose(args: argparse.Namespace) -> dict[Group, list[Way]]:
    """The rows that are asked for and not there yet, by group."""
    known, wanted = read(args.out), {}
    for group in groups():
        if any(asked and getattr(group, name) not in asked for name, asked in asks(args).items()):
            continue
        if group.how == "graph" and args.device == "cpu":
            continue
        chosen = [way for way in ways(group) if not args.sketch or way.about in args.sketch]
        if left := [way for way in chosen if "error" in known.get((group, way), {"error": "none yet"})]:
            wanted[group] = left
    return wanted


def asks(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in Group._fields}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, help_text in (
        ("case", ", ".join(CASES)),
        ("dtype", "float32, bfloat16"),
        ("attention", "sdpa, eager"),
        ("how", "eager, compiled, graph"),
        ("sketch", 'as in "strided 10%%,int4"; the caps at their peaks come with them'),
    ):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","), help=f"only these: {help_text}")
    parser.add_argument("--workers", type=int, default=12, help="processes at a time; 0 for none but this")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds of the whole run")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and tiny batches")
    parser.add_argument("--out", type=Path, default=RESULTS / "sketch_memory-h200.jsonl")
    parser.add_argument("--table", action="store_true", help="print the tables of the rows that are there")
    args = parser.parse_args(arguments)
    if args.table:
        print(tables(read(args.out).values()))
    elif args.out.parent == RESULTS and (args.tiny or args.device == "cpu"):
        parser.error("name a file with --out: the default one is for the whole model on a GPU")
    else:
        run(choose(args), args)


if __name__ == "__main__":
    main()
