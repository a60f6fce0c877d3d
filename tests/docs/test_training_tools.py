"""docs/training-tools.md has the table of what the tests on training tools try."""

import sys

import pytest

from tried import FOLDERS, in_page, table


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # training tools warn of much when they are imported
def test_the_table_of_what_was_tried_is_that_of_the_tests(monkeypatch):
    pytest.importorskip("trl", reason="trl is not installed (the extra tools)")
    monkeypatch.setattr(sys, "path", [*sys.path, *map(str, FOLDERS)])
    assert in_page() == table(), "run python tests/tried.py"
