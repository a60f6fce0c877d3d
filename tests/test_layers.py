"""The rooms of the house: which folder may import which, at any depth of code, and that there is no cycle."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

ROOT = Path(lowtide.__file__).parent

BASE = {"arguments", "errors", "units", "files", "process_wide", "_torch"}
"""What every room may import; those without torch import no `_torch`."""

LAYERS = {  # the pipeline from below; a room may import the base and what is named here
    "arguments": set(),
    "errors": set(),
    "units": set(),
    "files": set(),
    "process_wide": set(),
    "_torch": set(),
    "plans": set(),
    "solve": {"plans"},
    "console": {"plans"},
    "torch_state": set(),
    "devices": {"plans"},
    "measuring": {"devices", "torch_state"},
    "options": {"devices", "plans", "solve"},
    "capture": {"console", "devices", "plans", "torch_state"},
    "fusion": {"capture", "plans"},
    "prices": {"capture", "devices", "measuring", "plans"},
    "planner": {"devices", "plans", "solve"},
    "lowering": {"capture", "plans", "torch_state"},
    "stages": {"capture", "lowering", "options", "plans", "torch_state"},
    "ranks": {"capture", "devices", "plans", "prices", "stages"},
    "run": {"capture", "console", "devices", "measuring", "planner", "plans", "prices", "stages"},
    "sketching": {"capture", "console", "measuring", "plans", "solve", "stages"},
    "splitting": {"capture", "console", "plans", "solve", "stages"},
    "pipeline": {
        "stages",
        *("capture", "console", "devices", "ranks", "fusion", "lowering", "options", "planner"),
        *("plans", "prices", "run", "sketching", "splitting", "torch_state"),
    },
    "sharded": {
        "stages",
        *("capture", "devices", "lowering", "measuring", "options", "pipeline", "planner", "plans"),
        *("sketching", "torch_state"),
    },
    "entry": {
        "stages",
        *("capture", "console", "devices", "measuring", "options", "pipeline", "planner", "plans"),
        *("ranks", "sharded", "sketching", "torch_state"),
    },
    "evidence": {"console", "entry", "measuring", "pipeline", "plans", "sketching", "torch_state"},
    "batch_size": {"devices", "entry", "planner", "plans", "solve"},
    "layer_chain": {"devices", "measuring", "solve"},
    "sequences": {"console", "devices", "measuring", "solve", "torch_state"},
    "report": {"planner", "plans"},
    "integrations": {"console", "entry", "measuring", "options", "pipeline", "plans", "report"},
    "cli": {
        *("batch_size", "console", "devices", "entry", "evidence", "measuring", "planner", "plans"),
        *("report", "solve"),
    },
}

WITHOUT_TORCH = ("plans", "solve", "planner", "report")


def room(module):
    """The folder of a module, or the file at the top that it is."""
    return module.split(".")[0]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(module, path, tree):
    """The modules of the package that a module imports, in functions and for type checkers, too."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        for alias in node.names:
            inner = ".".join([*base, alias.name])
            yield inner if inner in MODULES else ".".join(base)


def edges():
    """Who imports whom, between rooms."""
    found = {}
    for module, path in MODULES.items():
        if module in ("", "__main__", "public"):  # the face of the package sees all
            continue
        for target in imports(module, path, ast.parse(path.read_text())):
            if room(target) and room(target) != room(module):
                found.setdefault((room(module), room(target)), []).append(f"{module} -> {target}")
    return found


def test_rooms_import_what_they_may():
    wrong = {pair: places for pair, places in edges().items() if pair[1] not in LAYERS[pair[0]] | BASE}
    assert not wrong, wrong


def test_every_room_is_in_the_picture():
    assert {room(module) for module in MODULES} - {"", "__main__", "public"} == set(LAYERS)


def test_layers_have_no_cycle():
    left = {name: set(below) for name, below in LAYERS.items()}
    while left:
        free = {name for name, below in left.items() if not below & set(left)}
        assert free, f"a cycle among {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in free}


@pytest.mark.slow
def test_layers_say_no_more_than_is_so():
    """What a room may import it does import: the picture shows the house as it is."""
    found = {(a, b) for a, b in edges() if b not in BASE}
    said = {(name, below) for name, rooms in LAYERS.items() for below in rooms}
    assert said - found == set()


@pytest.mark.slow
def test_plans_solvers_planner_and_reports_import_no_torch():
    modules = [module for module in MODULES if room(module) in WITHOUT_TORCH]
    code = "import sys; sys.modules['torch'] = None\n"
    code += "\n".join(f"import lowtide.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in modules:
        tree = ast.parse(MODULES[module].read_text())
        names = {name for node in ast.walk(tree) for name in imported(node)}
        assert not {name for name in names if name.split(".")[0] == "torch"}, module


def imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_the_page_for_contributors_names_every_room():
    page = (ROOT.parent.parent / "docs" / "architecture.md").read_text()
    missing = [name for name in LAYERS if f"`{name}/`" not in page and f"`{name}`" not in page]
    assert not missing


def test_at_most_twelve_files_at_the_top():
    assert len(list(ROOT.glob("*.py"))) <= 12


def test_no_module_has_the_name_of_a_public_function():
    functions = {name for name in lowtide.__all__ if callable(getattr(lowtide, name)) and name.islower()}
    assert not [module for module in MODULES if module.split(".")[-1] in functions]


def test_each_room_says_what_comes_in_what_goes_out_and_what_it_imports():
    rooms = {path.parent.name: path for path in sorted(ROOT.glob("*/__init__.py"))}
    for name, path in rooms.items():
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert "\nIn: " in text, name
        assert "\nOut: " in text, name
        said = text.partition("\nImports: ")[2].partition("\n\n")[0]
        assert set(re.findall(r"(\w+)/", said)) == LAYERS[name] & set(rooms), name
