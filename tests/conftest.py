"""One thread, a cache folder of its own, and no compiled code carried from test to test."""

import ctypes
import gc
import os
import shutil
import sys
import tempfile

os.environ["LOWTIDE_CACHE"] = tempfile.mkdtemp(prefix="lowtide-test-")

import pytest
import torch
from hypothesis import HealthCheck, settings

import browsers

torch.set_num_threads(1)

# A busy machine is no fault of the code: nothing here is judged by the time it takes.
SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile(
    "lowtide", deadline=None, suppress_health_check=SLOWNESS, derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("lowtide")


def pytest_collection_finish():
    """What the imports left stays to the end, so no pass of the garbage collector need look at it again."""
    gc.collect()
    gc.freeze()
    # Captures make many objects and few cycles: looking for them took a tenth of the whole time.
    gc.set_threshold(50_000, 20, 20)


def pytest_runtest_setup(item):
    """Where something is missing, a test that needs it says what to install."""
    if item.get_closest_marker("browser") and browsers.missing():
        pytest.skip(browsers.missing())
    if item.get_closest_marker("inductor") and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler for Inductor: apt-get install g++")


@pytest.fixture(autouse=True)
def fresh_compiler():
    forget_compiled_code()
    torch.set_num_threads(1)  # training tools set their own
    torch.manual_seed(0)
    yield
    forget_compiled_code()


def forget_compiled_code():
    """Where `torch._dynamo` was not imported, nothing was compiled; importing it takes seconds."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def caplog_lowtide():
    """The messages that Lowtide says, as a list."""
    import logging

    messages = []

    class Keep(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Keep()
    logging.getLogger("lowtide").addHandler(handler)
    yield messages
    logging.getLogger("lowtide").removeHandler(handler)


@pytest.fixture
def process_group(tmp_path):
    """A group of this one process, for DistributedDataParallel."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    keep_for_ever(torch.distributed.group.WORLD)
    yield
    torch.distributed.destroy_process_group()


def keep_for_ever(group):
    """The end of a group waits, with the GIL held, for threads that may need the GIL: it never comes."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@pytest.fixture
def weight():
    """What a small cell of the tests on sequences closes over."""
    return torch.randn(4, 4, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def xs():
    """Nine steps for a small cell."""
    return torch.randn(9, 2, 4, dtype=torch.float64)


@pytest.fixture
def start():
    """The first carry of a small cell."""
    return torch.randn(2, 4, dtype=torch.float64)


@pytest.fixture
def captures(monkeypatch):
    """A stand-in for CUDA's graphs: a captured function is one that is called again.

    What was captured, and how often each was launched; the test may set an error to be raised instead.
    """
    from lowtide.sequences import graph_loop, graphing, passage

    found = {"launched": [], "error": None, "from": 0}

    def captured(body, device):
        number = len(found["launched"])
        if found["error"] is not None and number >= found["from"]:
            raise found["error"]
        found["launched"].append(0)

        def replay():
            found["launched"][number] += 1
            body()

        return replay

    for module in (graphing, passage):
        monkeypatch.setattr(module, "may_capture", lambda device: True)
    monkeypatch.setattr(graph_loop, "captured", captured)
    monkeypatch.setattr(graph_loop, "warm", lambda body, device: body())
    return found
