"""Every tool on every model: peak memory against step time, with the gradients checked, on one GPU.

    PYTHONPATH=src python benchmarks/headtohead.py --workers 6 --deadline 540
    PYTHONPATH=src python benchmarks/headtohead.py --models gpt,unet --tools compile,lowtide-inductor
    PYTHONPATH=src python benchmarks/headtohead.py --fill
    PYTHONPATH=src python benchmarks/headtohead.py --table --plot docs/headtohead

Models, tools and settings are listed in headtohead_results.py. A row that the results file has is skipped, so
a run can be stopped and continued; `--again errors` tries those anew that failed, `--again all` all that are
asked for. The last row of a kind counts. `--fill` runs Lowtide at the very peaks of other tools' points that
none of its rows meets yet: their peaks seldom are a round share of Lowtide's.

Most of the time goes into compilers, which need no GPU: several processes work at once, each on a few rows of
one model, and only what is measured (the eager reference and Lowtide's prices too) goes in turns. While one
takes the times of its steps, the others stand still.
Set-up times are therefore those of a busy machine, and kernels that another setting compiled are found in
Inductor's cache. After `--deadline` seconds no row is started and what runs is stopped; a row that takes
more than `--limit` seconds is given up, with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import headtohead_others
from headtohead_picture import picture
from headtohead_results import (
    BROKEN,
    MODELS,
    RESULTS,
    TOOLS,
    Key,
    beside_unmet,
    key,
    keys,
    latest,
    points,
    title,
    verdict_text,
)
from headtohead_table import table
from row_files import Row, append, read

GROUPS = (("eager", "checkpoint", "selective"), ("lowtide-inductor",), ("compile",), ("lowtide-eager",))
PAUSE = 0.2


def missing(wanted: list[Key], rows: list[Row], *, again: str, before: int) -> list[Key]:
    """The rows to run; `before` is how many lines the file had when the run began."""
    old = [row for row in rows[:before] if again == "none" or (again == "errors" and "error" not in row)]
    done = {key(row) for row in [*old, *rows[before:]]}
    return [known for known in wanted if known not in done]


@dataclass
class Job:
    """Some rows of one model and a group of tools, in order."""

    wanted: list[Key]
    process: subprocess.Popen[bytes] | None = None
    left: int = 0
    since: float = 0.0

    @property
    def model(self) -> str:
        return self.wanted[0][0]

    @property
    def base(self) -> Key:
        """The row that keeps the most: shares are of its peak, and gradients may be compared with its."""
        model, tool, _ = self.wanted[0]
        return model, tool, TOOLS[tool][0]

    def progress(self, left: int) -> None:
        """Note when a row of it was last written."""
        if left != self.left:
            self.left, self.since = left, time.time()

    def stop(self) -> None:
        """End the process with the compilers that it started."""
        assert self.process is not None
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Run:
    """Jobs, some of which run at the same time, until the deadline."""

    def __init__(self, wanted: list[Key], args: argparse.Namespace) -> None:
        self.args, self.wanted = args, wanted
        self.before = len(read(args.out)) if args.before is None else args.before
        self.until = time.time() + args.deadline
        self.running: list[Job] = []

    def missing(self, wanted: list[Key]) -> list[Key]:
        return missing(wanted, read(self.args.out), again=self.args.again, before=self.before)

    def jobs(self) -> list[Job]:
        """The quick tools first; of the others the largest models first, so that none is left for the end."""
        found = []
        for group in GROUPS:
            for model in MODELS if group is GROUPS[0] else reversed(MODELS):
                part = [known for known in self.wanted if known[0] == model and known[1] in group]
                left = self.with_base(self.missing(part))
                found += [Job(some) for some in batched(left, self.args.rows)]
        return found

    def with_base(self, wanted: list[Key]) -> list[Key]:
        """The rows, after the uncapped one where shares of its peak are wanted and the file lacks it."""
        shares = [Job([known]).base for known in wanted if known[2].endswith("%")]
        known = {key(row) for row in points(read(self.args.out))}
        return [base for base in dict.fromkeys(shares) if base not in known.union(wanted)] + wanted

    def next(self, waiting: list[Job]) -> Job | None:
        """Take the first job that need not wait for a row of another one."""
        pending = {known for job in (*waiting, *self.running) for known in job.wanted}
        for job in waiting:
            if job.base in job.wanted or job.base not in pending or not self.missing([job.base]):
                waiting.remove(job)
                return job
        return None

    def __call__(self) -> None:
        waiting = self.jobs()
        try:
            while (waiting or self.running) and time.time() < self.until:
                while len(self.running) < self.args.workers and (job := self.next(waiting)):
                    self.running.append(self.start(job))
                self.running = [job for job in self.running if self.goes_on(job, waiting)]
                time.sleep(PAUSE)
        finally:
            for job in self.running:
                job.stop()

    def start(self, job: Job) -> Job:
        args = self.args
        command = [sys.executable, __file__, "--worker", "--models", job.model, "--out", str(args.out)]
        command += ["--tools", ",".join(dict.fromkeys(name for _, name, _ in job.wanted))]
        command += ["--settings", ",".join(dict.fromkeys(setting for *_, setting in job.wanted))]
        command += ["--steps", str(args.steps), "--device", args.device, *(["--tiny"] if args.tiny else [])]
        command += ["--again", args.again, "--before", str(self.before)]
        command += ["--deadline", str(self.until - time.time())]
        threads = str(max((os.cpu_count() or 1) // args.workers, 1))
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ, **headtohead_others.naming()}
        job.process = subprocess.Popen(command, env=environment, start_new_session=True)
        job.since, job.left = time.time(), len(self.missing(job.wanted))
        return job

    def goes_on(self, job: Job, waiting: list[Job]) -> bool:
        """Whether the job's process still runs; one that failed is started again after that row."""
        assert job.process is not None
        status = job.process.poll()  # before the file is read: what it wrote at its end counts
        left = self.missing(job.wanted)
        job.progress(len(left))
        if status is None:
            if time.time() - job.since <= self.args.limit:
                return True
            job.stop()
            self.give_up(left, f"no row within {self.args.limit:.0f} s")
        elif status not in (0, BROKEN):
            self.give_up(left, f"the process ended with exit status {status}")
        if status != 0:
            headtohead_others.go_on()
            if self.missing(job.wanted):
                waiting.append(Job(job.wanted))
        return False

    def give_up(self, left: list[Key], reason: str) -> None:
        if left:
            model, tool, setting = left[0]
            append({"model": model, "tool": tool, "setting": setting, "error": reason}, self.args.out)
            print(f"{model:13} {tool:17} {setting:9} {reason}", flush=True)


def work(wanted: list[Key], args: argparse.Namespace) -> None:
    """What a process that was started for one job does."""
    from headtohead_work import Worker

    left = missing(wanted, read(args.out), again=args.again, before=args.before or 0)
    if left:
        worker = Worker(left[0][0], args.out, device=args.device, tiny=args.tiny, steps=args.steps)
        worker.work(left, time.time() + args.deadline)


def plot(rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        mine = points(row for row in latest(rows) if row["model"] == model)
        if mine:
            (folder / f"{model}.svg").write_text(picture(title(model, mine), mine), encoding="utf-8")


def batched(known: list[Key], size: int) -> list[list[Key]]:
    return [known[start : start + size] for start in range(0, len(known), size)]


def names(text: str) -> list[str]:
    return text.split(",")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names, default=list(MODELS), help="names with commas between")
    parser.add_argument("--tools", type=names, default=list(TOOLS), help="names with commas between")
    parser.add_argument("--settings", type=names, help="only these budgets, of tools that have any")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of a row")
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--workers", type=int, default=6, help="processes at a time")
    parser.add_argument("--rows", type=int, default=4, help="rows of a process at most")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds of the whole run")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of a row")
    parser.add_argument("--again", choices=("none", "errors", "all"), default="none", help="rows to redo")
    parser.add_argument(
        "--fill", action="store_true", help="run Lowtide at the peaks of points that no row of it meets"
    )
    parser.add_argument("--table", action="store_true", help="print the table and the verdict, run nothing")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the models there, run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny versions of the models")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    for given, known in ((args.models, MODELS), (args.tools, TOOLS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not known; choose among {', '.join(known)}")
    if args.out is None and (args.tiny or args.device == "cpu"):
        parser.error("name a file with --out: the default one is for the full models on a GPU")
    args.out = args.out or RESULTS
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    wanted = keys(args.models, args.tools, args.settings)
    if args.fill:
        wanted = [known for known in beside_unmet(read(args.out)) if known[0] in args.models]
    if args.worker:
        work(wanted, args)
        return
    if not args.table and args.plot is None:
        Run(wanted, args)()
    rows = [row for row in read(args.out) if row["model"] in args.models and row["tool"] in args.tools]
    if args.plot is not None:
        plot(rows, args.plot)
    print(f"{table(rows)}\n\n{verdict_text(rows)}")


if __name__ == "__main__":
    main()
