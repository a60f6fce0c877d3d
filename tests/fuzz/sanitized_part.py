"""The compiled search under AddressSanitizer and UndefinedBehaviorSanitizer, in a process of its own.

The first thing that is out of bounds, freed, wrapped around or shifted too far ends that process, with where
it was. Python does not know the sanitizers: their library is loaded before it, and looks for no leaks, of
which an interpreter has many; `tests/solve/test_no_memory.py` counts the blocks of the search itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

FLAGS = ["-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
GRAPHS = 6
"""Graphs of a case: a process takes a second to begin."""


def case(seed: int) -> None:
    """Some graphs, each planned by a search in C; it is compiled once for a cache folder."""
    library = sanitizer()
    assert library is not None, missing()
    settings = {
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "fuzz.sanitized_part", str(seed)],
        env={**os.environ, **settings, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


@cache
def sanitizer() -> str | None:
    """The library that has to be loaded first; None where the compiler has none."""
    compiler = shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    asked = [compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return found if os.path.isabs(found) else None


def missing() -> str:
    """Why the part cannot run, where it cannot."""
    return "" if sanitizer() else "needs gcc with its sanitizers, on Linux: apt-get install gcc"


def _search(first: int) -> None:
    """In the process of its own: everything that C does for a search."""
    from random import Random

    from fuzz.random_graphs import random_valid_graph
    from graphs import random_graph
    from lowtide.plans.graph import Graph
    from lowtide.solve.auto import frontier_schedules
    from lowtide.solve.search import build, coarse
    from lowtide.solve.search.coarse import in_units
    from lowtide.solve.search.native import NativeTape
    from lowtide.solve.search.tape import Facts
    from short_search import short_search

    def work(graph: Graph, chance: Random) -> None:
        facts = Facts(graph)
        tape = NativeTape(facts, facts.order([op.name for op in graph.ops if op.phase == "forward"], []))
        tape.ruin(0.0, 1.0, share=0.5, seed=first)
        for _ in range(3):
            budget = int(tape.peak() * chance.uniform(0.3, 1.0))
            tape.descend(budget, exponent=chance.choice((0.5, 1.0, 2.0)), noise=chance.random(), seed=first)
            if graph.ops and facts.size:
                tape.anneal(budget, steps=300, price=1e-9, heat=(1.0, 0.01), seed=first)
            tape.copy().prune(tape.peak())

    coarse.EXACT_BITS = int(os.environ.get("LOWTIDE_FUZZ_EXACT_BITS", coarse.EXACT_BITS))
    build.FLAGS += FLAGS
    build.PATIENCE = 600.0  # the machine may be busy
    assert build.library() is not None, "the search could not be built with its sanitizers"
    with short_search():
        for seed in range(first, first + GRAPHS):
            chance = Random(seed)
            usual = random_graph(seed, chance.randint(1, 25), takes=chance.random() < 0.5)
            for graph in (usual, _scaled(usual, chance), random_valid_graph(seed)):
                frontier_schedules(graph)
                if not any(op.phase == "backward" for op in graph.ops):
                    work(in_units(graph)[0], chance)


def _scaled(graph, chance):  # type: ignore[no-untyped-def]
    """The graph with bytes of nearly 2^60 in all."""
    from dataclasses import replace

    factor = ((1 << 60) - 1) // max(graph.all_bytes, 1) // chance.choice((1, 1, 16))
    return graph.replace(
        ops=tuple(replace(op, workspace=op.workspace * factor, state=op.state * factor) for op in graph.ops),
        values=tuple(replace(value, bytes=value.bytes * factor) for value in graph.values),
        fixed={name: size * factor for name, size in graph.fixed.items()},
        boundary=graph.boundary * factor,
    )


if __name__ == "__main__":
    _search(int(sys.argv[1]))
