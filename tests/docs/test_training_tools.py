"""docs/training-tools.md has the table of what the tests on training tools try."""

import subprocess
import sys

import pytest

from tried import ROOT, in_page

CODE = "import sys, tried; sys.path += map(str, tried.FOLDERS); print(tried.table(), end='')"


@pytest.mark.slow
def test_the_table_of_what_was_tried_is_that_of_the_tests():
    pytest.importorskip("trl", reason="trl is not installed (the extra tools)")
    command = [sys.executable, "-c", CODE]
    found = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True)
    assert in_page() == found.stdout, "run python tests/tried.py"
