"""Compare the planners on the corpus: smallest peaks, extra times, the proven bound, planning seconds.

    python benchmarks/plans.py                        # what is missing in results/plans.jsonl, and all tables
    python benchmarks/plans.py --only unet --methods auto bound --again

Two (graph, method) pairs run at a time, each in a process of its own that may use `--limit` seconds of the
CPU (three times as many for torch's partitions, which trace the network first); what a method answered before
it ran over is kept. The file is rewritten whole, by a rename, after every pair, so a run can be interrupted
and continued. A line is reused when the sources of its method and its graph are what they were (`solver` is
their hash) and it did not run over a smaller limit; `--again` makes all the lines that are asked for anew.
Lines that are not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import resource
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from commit import commit
from corpus import FOLDER, names
from plan_methods import ROWS, rows
from plan_results import BOUND, RESULTS, Pair, Row, read, write
from plan_text import summary_text, table_text

SOURCE = Path(__file__).parent.parent / "src" / "lowtide"
LIMIT = 120
AT_ONCE = 2

Rows = dict[Pair, Row]


def arranged(results: Rows) -> Rows:
    """The rows in the order of the corpus, each with the bound of its graph."""
    bounds = {name: row.extra for (name, method), row in results.items() if method == BOUND}
    return {pair: replace(results[pair], bound=bounds.get(pair[0], {})) for pair in ordered(results)}


def ordered(pairs: Iterable[Pair]) -> list[Pair]:
    graphs, methods = names(), list(ROWS)
    return sorted(pairs, key=lambda pair: (graphs.index(pair[0]), methods.index(pair[1])))


def sources(method: str) -> Iterator[Path]:
    """The files that decide what a method answers."""
    solve = SOURCE / "solve"
    own = solve / ("lower_sets" if method.startswith("lower_sets") else method)
    yield Path(__file__).parent / "plan_methods.py"
    yield from (SOURCE / "plans" / f"{name}.py" for name in ("events", "keep_all", "order", "simulator"))
    yield from (solve / f"{name}.py" for name in ("chain_stages", "sqrt_segments"))
    folder = solve if method in ("auto", "quick") else own
    yield from (path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))
    yield from Path(__file__).parent.glob(f"{method}.py")


def fingerprint(name: str, method: str) -> str:
    """A hash of the sources of the method and of the graph."""
    digest = hashlib.sha256()
    for path in sorted(sources(method)):
        digest.update(path.read_bytes())
    graph = FOLDER / f"{name}.json"
    digest.update(graph.read_bytes() if graph.exists() else b"")
    return digest.hexdigest()[:16]


def seconds_for(method: str, limit: int) -> int:
    """The seconds that a method may use; tracing is not planning, but it happens in the same process."""
    return 3 * limit if method == "torch_budget" else limit


def is_current(row: Row | None, limit: int) -> bool:
    if row is None or row.solver != fingerprint(row.graph, row.method):
        return False
    return row.over is None or row.over >= seconds_for(row.method, limit)


@dataclass
class Job:
    """A pair that runs in a process of its own, and the last row that it sent."""

    process: ForkProcess
    row: Row

    def finish(self, limit: int) -> Row:
        """The row when the process has ended, by itself or because of its limit."""
        self.process.join()
        limit = seconds_for(self.row.method, limit)
        if self.process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return replace(self.row, over=limit)
        if self.process.exitcode:
            return replace(self.row, reason=f"failed with exit status {self.process.exitcode}")
        return self.row


def work(name: str, method: str, limit: int, sender: Connection) -> None:
    """What a process does. The system ends it when it has used its seconds."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = seconds_for(method, limit)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for row in rows(name, method):
        sender.send(row)


def run(pairs: Iterable[Pair], limit: int) -> Iterator[Row]:
    """The rows of the pairs, as they are done."""
    context = multiprocessing.get_context("fork")
    # The processes run the code as it is now, whatever becomes of the files while they do.
    waiting = [Row(*pair, commit=commit(), solver=fingerprint(*pair)) for pair in pairs]
    jobs: dict[Connection, Job] = {}
    while waiting or jobs:
        while waiting and len(jobs) < AT_ONCE:
            row = waiting.pop(0)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(row.graph, row.method, limit, sender), daemon=True)
            jobs[receiver] = Job(process, row)
            process.start()
            sender.close()
        for receiver in wait(list(jobs)):
            job = jobs[receiver]
            try:
                job.row = replace(receiver.recv(), solver=job.row.solver, commit=job.row.commit)
            except EOFError:
                yield jobs.pop(receiver).finish(limit)


def compare(pairs: list[Pair], path: Path, *, limit: int, again: bool) -> Rows:
    """Run what has to be run, and print the table of each graph when its last row is there."""
    results = read(path)
    missing = [pair for pair in pairs if again or not is_current(results.get(pair), limit)]
    left = set(missing)
    shown: set[str] = set()
    for row in run(missing, limit):
        pair = row.graph, row.method
        results = arranged({**results, pair: row})
        left.discard(pair)
        write(results.values(), path)
        show(results, pairs, left, shown)
    show(results, pairs, left, shown)
    return results


def show(results: Rows, pairs: list[Pair], left: set[Pair], shown: set[str]) -> None:
    done = dict.fromkeys(name for name, _ in pairs if name not in shown.union(graph for graph, _ in left))
    for name in done:
        print(table_text([row for (graph, _), row in results.items() if graph == name]) + "\n", flush=True)
    shown.update(done)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names(), default=names())
    parser.add_argument("--methods", nargs="+", metavar="METHOD", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--again", action="store_true", help="run also what the file has already")
    parser.add_argument("--limit", type=int, default=LIMIT, help="seconds of the CPU per graph and method")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    args = parser.parse_args(arguments)
    pairs = ordered((name, method) for name in args.only for method in args.methods)
    results = compare(pairs, args.out, limit=args.limit, again=args.again)
    print(summary_text([row for row in results.values() if row.graph in args.only]))


if __name__ == "__main__":
    main()
