"""Two ranks, started once for all tests of this folder."""

import pytest

from distributed_ranks import run_ranks
from once import once


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory):
    """The folder with what both ranks found: a folder in it for each part of `all_ranks.py`."""
    return once(tmp_path_factory, "ranks", lambda folder: run_ranks("all_ranks.py", folder))
