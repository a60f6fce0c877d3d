"""What a user may lean on: the names, the version, the types, the examples in the docstrings."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

import lowtide
from lowtide import public

ROOT = Path(lowtide.__file__).parent
MODULES = ["lowtide", *(found.name for found in pkgutil.walk_packages(lowtide.__path__, "lowtide."))]
PUBLIC = [getattr(lowtide, name) for name in lowtide.__all__]
WITHOUT_TORCH = [
    "units.py",
    "errors.py",
    "files/cache_folder.py",
    "files/whole_files.py",
    "files/plain_text.py",
    "console/progress.py",
]
WITHOUT_TORCH += ["planner/frontiers.py", "planner/too_small.py"]
ROOMS_WITHOUT_TORCH = ["plans", "report", "solve"]


def test_names():
    assert lowtide.__all__ == [
        "BudgetError",
        "BudgetTooSmall",
        "CaptureError",
        "CheckpointedChain",
        "Drop",
        "FormatError",
        "Frontier",
        "Graph",
        "GraphBreak",
        "LargestBatch",
        "LowtideError",
        "Measurement",
        "Noise",
        "NothingToTrain",
        "Op",
        "OutOfTime",
        "Plan",
        "PlanMismatch",
        "RanksDiffer",
        "Recurrent",
        "Run",
        "ScanPlan",
        "Schedule",
        "ScheduleError",
        "Timeline",
        "UnsupportedBackward",
        "Value",
        "Verification",
        "Watched",
        "cap",
        "checkpoint_chain",
        "frontier",
        "largest_batch",
        "measure",
        "noise",
        "plan",
        "plan_of",
        "scan",
        "scan_plan",
        "simulate",
        "sketch",
        "solve",
        "uncap",
        "unsketch",
        "verify",
        "watch",
        "while_scan",
    ]
    loaded = [name for name in vars(public) if not name.startswith("_")]
    assert lowtide.__all__ == sorted(lowtide.__all__) == sorted(loaded)
    assert set(lowtide.__all__) < set(dir(lowtide))


def test_importing_is_cheap():
    code = (
        "import sys, lowtide, lowtide.plans.planned_step, lowtide.planner.frontiers\n"
        "assert 'torch' not in sys.modules and lowtide.__version__\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_no_module_hides_a_function():
    code = (
        "import sys, lowtide, lowtide.plans.planned_step, lowtide.planner.frontiers\n"
        "assert callable(lowtide.plan) and callable(lowtide.frontier) and type(lowtide) is type(sys)\n"
        "assert lowtide.Plan is lowtide.plans.planned_step.Plan\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'lowtide' has no attribute 'caps'"):
        lowtide.caps  # noqa: B018


def test_names_are_documented():
    for name in lowtide.__all__:
        own = vars(getattr(lowtide, name))["__doc__"] if inspect.isclass(getattr(lowtide, name)) else None
        text = own or inspect.getdoc(getattr(lowtide, name))
        assert text, name
        assert not text.startswith(f"{name}("), name


def test_version_is_that_of_the_project():
    project = ROOT.parent.parent / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == lowtide.__version__


def test_types_ship():
    assert (ROOT / "py.typed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", lowtide.__all__)
def test_a_public_name_has_an_example_that_is_whole_in_itself(name):
    found = getattr(lowtide, name)
    examples = doctest.DocTestParser().get_doctest(found.__doc__, {}, name, None, None)
    assert examples.examples
    assert _failed([examples]) == 0


@pytest.mark.slow
def test_examples_in_docstrings_run():
    public_names = {f"{own.__module__}.{own.__name__}" for own in PUBLIC if not inspect.ismodule(own)}
    for module in modules():
        found = doctest.DocTestFinder(exclude_empty=True).find(module, module.__name__)
        assert _failed(tests for tests in found if tests.name not in public_names) == 0, module.__name__


def modules():
    """All modules; the one that needs Triton only where it is: it comes with torch on machines with a GPU."""
    for name in MODULES:
        if name != "lowtide.sketching.kernels" or find_spec("triton"):
            yield importlib.import_module(name)


def _failed(tests):
    """How many examples do not print what they say; `...` stands for anything."""
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    return sum(runner.run(test).failed for test in tests)


@pytest.mark.slow
def test_modules_list_their_names():
    for module in modules():
        assert module.__doc__, module.__name__
        for listed in getattr(module, "__all__", ()):
            assert hasattr(module, listed), f"{module.__name__}.{listed}"


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0] if not node.level else ""


@pytest.mark.slow
def test_planning_itself_knows_no_torch():
    paths = [ROOT / name for name in WITHOUT_TORCH]
    paths += [path for room in ROOMS_WITHOUT_TORCH for path in (ROOT / room).rglob("*.py")]
    assert not [path for path in paths if "torch" in set(imports(path))]
