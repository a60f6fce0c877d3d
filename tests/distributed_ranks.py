"""Several ranks on this machine: a script of `tests/distributed` as one process per rank."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
LONGEST = 600
"""Seconds after which ranks that wait for each other are ended; no test is judged by the time it takes."""


def run_ranks(script, *arguments, count=2):
    """Run a script with the number of its rank and the arguments, and show what it says where it fails."""
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(TESTS / "distributed" / script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [rank.communicate(timeout=LONGEST)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    assert not failed, "\n\n".join(failed)
