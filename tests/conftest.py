"""One thread, a cache folder of its own, and no compiled code carried from test to test."""

import ctypes
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["LOWTIDE_CACHE_BEFORE"] = os.environ.get("LOWTIDE_CACHE", "")
os.environ["LOWTIDE_CACHE"] = tempfile.mkdtemp(prefix="lowtide-test-")

import pytest
import torch
from hypothesis import HealthCheck, settings

import browsers
import compiled_search
import cpu_seconds
from distributed_ranks import run_ranks
from lighter import forget_compiled_code, spare_the_garbage_collector
from lowtide.solve.search import build
from once import once

torch.set_num_threads(1)
build.PATIENCE = 600.0  # a compiler on a busy machine is late, and does not hang
if "PYTEST_XDIST_WORKER" in os.environ:  # whose cache folder was that of the process that started it
    compiled_search.share(os.environ["LOWTIDE_CACHE_BEFORE"], os.environ["LOWTIDE_CACHE"])

# A busy machine is no fault of the code: nothing here is judged by the time it takes.
SLOWNESS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile(
    "lowtide", deadline=None, suppress_health_check=SLOWNESS, derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("lowtide")

FOLLOW_PLANS = {
    *("batch_size", "capture", "cli", "console", "distributed", "docs", "entry", "evidence", "fusion"),
    *("integrations", "lowering", "measuring", "pipeline", "planner", "run", "sequences", "sketching"),
    *("torch_state", "devices", "splitting", "report", "prices", "plans", "layer_chain"),
}
"""Rooms whose tests run plans and do not judge them: they have the search of `short_search.py`."""


def pytest_addoption(parser):
    parser.addoption("--cpu", action="store_true", help="list the tests that take the most CPU time")


def pytest_configure(config):
    if config.option.cpu:
        config.pluginmanager.register(cpu_seconds.CpuSeconds())


def pytest_ignore_collect(collection_path, config):
    """Where all tests of a file are left out by their mark, what the file imports can be left out, too.

    `make quick` so need not import every training tool, which takes longer than most of its tests.
    """
    left_out = re.fullmatch(r"not (\w+)( and not \w+)*", config.option.markexpr)
    if not left_out or not collection_path.name.startswith("test_"):
        return None
    marks = "|".join(config.option.markexpr.removeprefix("not ").split(" and not "))
    of_all = rf"^pytestmark = (\[[^\]]*|.*)\bpytest\.mark\.({marks})\b"
    return True if re.search(of_all, collection_path.read_text(), re.MULTILINE) else None


def pytest_collection_finish():
    spare_the_garbage_collector()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    spare_the_garbage_collector()


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
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # no note for a later CUDA, with the stack of each call
    yield
    forget_compiled_code()


@pytest.fixture(autouse=True)
def fresh_headroom():
    """What the rounds of one test have come to says nothing of the next: some make plans too large."""
    yield
    shutil.rmtree(Path(os.environ["LOWTIDE_CACHE"], "headroom"), ignore_errors=True)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Its state is one for the process, and refuses another precision than the first one."""
    yield
    if (found := sys.modules.get("accelerate.state")) is not None:
        found.AcceleratorState._reset_state(True)
        found.GradientState._reset_state()


@pytest.fixture(autouse=True)
def effort_of_the_search(request):
    """Short, with steady prices, where a plan is only followed; the same graph is searched once."""
    room = request.path.relative_to(Path(__file__).parent).parts[0]
    if room in FOLLOW_PLANS and not request.node.get_closest_marker("whole_search"):
        from short_search import short_search, steady_prices

        with short_search(), steady_prices():
            yield
    else:
        if (auto := sys.modules.get("lowtide.solve.auto")) is not None:
            auto._MOST_REMEMBERED = 100  # the same graph gets the same ladder
        yield


@pytest.fixture
def idle_kernels(request, monkeypatch):
    """Inductor compiles no kernel, where no number of a compiled step is looked at: its text and its peak.

    A test of both executors has its other one as it is.
    """
    of_test = getattr(request.node, "callspec", None)
    if of_test is not None and of_test.params.get("executor") == "eager":
        yield
        return
    kernel = "torch._inductor.async_compile.AsyncCompile.cpp_pybinding"
    monkeypatch.setattr(kernel, lambda *_, **__: lambda *_: None)
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.fixture
def vector_kernels():
    """Inductor's kernels in vectors, as users have them, where their rounding is compared with eager code."""
    from torch._inductor import config

    with config.patch({"cpp.simdlen": None}):
        yield


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


@pytest.fixture(scope="session")
def of_two_ranks(tmp_path_factory):
    """The folder with what two ranks found: a folder in it for each part of `distributed/all_ranks.py`."""
    return once(tmp_path_factory, "ranks", lambda folder: run_ranks("all_ranks.py", folder))


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
