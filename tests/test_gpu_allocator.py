"""torch's CUDA allocator beside its replay: the same bytes allocated and reserved after each request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import allocator_streams
from allocator_streams import OnPaper, differences
from lowtide.devices.allocator_settings import read_settings

SETTINGS = [
    *("", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"),
    "roundup_power2_divisions:[4:1,16:2,>:8],max_split_size_mb:64",
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_replay_is_what_torch_does(setting):
    source = Path(allocator_streams.__file__).parent
    path = os.pathsep.join([str(source), *sys.path])
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": setting, "PYTHONPATH": path}
    command = [sys.executable, allocator_streams.__file__]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == [[]] * 5


def test_a_difference_would_be_seen():
    """The replay beside itself, and beside itself with another setting."""
    usual, other = OnPaper(), OnPaper((), read_settings("roundup_power2_divisions:4"))
    assert differences(OnPaper(), usual, 0) == []
    assert differences(OnPaper(), other, 0)
