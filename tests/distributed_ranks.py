"""Several ranks on this machine: a script of `tests/distributed` as one process for each.

A script is given a folder and the number of its rank. Its process group meets in a file of that folder, and
each rank has a cache of prices of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import compiled_search

TESTS = Path(__file__).parent
LONGEST = 3600
"""Seconds after which ranks that wait for each other are ended, far more than they take on a busy machine."""


def run_ranks(script, folder, count=2):
    """Run a script on each rank, and show what it says where one fails."""
    logs = [Path(folder, f"{rank}.log") for rank in range(count)]
    ranks = [_start(script, folder, rank, log) for rank, log in enumerate(logs)]
    try:
        for rank in ranks:
            rank.wait(timeout=LONGEST)
    finally:
        for rank in ranks:
            rank.kill()
    told = "\n".join(log.read_text()[-3000:] for log in logs)
    assert [rank.returncode for rank in ranks] == [0] * count, told


def _start(script, folder, rank, log):
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    cache = Path(folder, f"cache{rank}")
    compiled_search.copy(os.environ["LOWTIDE_CACHE"], cache)
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LOWTIDE_CACHE": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as file:
        return subprocess.Popen(
            [sys.executable, str(TESTS / "distributed" / script), str(folder), str(rank)],
            env={**os.environ, **own},
            stdout=file,
            stderr=file,
        )
