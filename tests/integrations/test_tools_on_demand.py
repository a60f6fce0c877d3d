"""Tools are imported when they are asked for, and one that is missing is named."""

import subprocess
import sys

import pytest

import lowtide

CHEAP = """
import sys, lowtide
lowtide.integrations
assert not {"torch", "transformers", "lightning"} & set(sys.modules)
"""
MISSING = """
import sys
sys.modules["transformers"] = None
import lowtide
try:
    lowtide.integrations.transformers
except ImportError as error:
    assert 'pip install "transformers[torch]"' in str(error), error
else:
    raise AssertionError
"""


def test_a_room_of_tools_imports_none_of_them():
    subprocess.run([sys.executable, "-c", CHEAP], check=True)


@pytest.mark.slow
def test_a_missing_tool_is_named():
    subprocess.run([sys.executable, "-c", MISSING], check=True)


def test_a_tool_that_is_not_known():
    with pytest.raises(AttributeError, match=r"lowtide.integrations' has no attribute 'keras'"):
        lowtide.integrations.keras  # noqa: B018
