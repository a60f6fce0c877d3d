"""Private torch names: each is listed in one file, exists, and is used; no other file reaches for one."""

import ast
import re
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import _torch

ROOT = Path(lowtide.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "_torch.py"]


def test_names_exist():
    for name in _torch.missing_names():
        place, versions = _torch.NAMES[name]
        pytest.fail(
            f"torch {torch.__version__} has no {place}, seen in torch {versions}: find what took its place, "
            "and correct lowtide/_torch.py"
        )


def test_every_name_is_used():
    sources = "".join(path.read_text() for path in sorted(ROOT.rglob("*.py")))
    assert set(re.findall(r'private\("(\w+)"\)', sources)) == set(_torch.NAMES)


@pytest.mark.parametrize("place", ["torch._no_such_module:thing", "torch._C:_no_such_thing"])
def test_missing_name_says_where_and_which_versions(monkeypatch, place):
    monkeypatch.setitem(_torch.NAMES, "gone", (place, "2.11-2.13"))
    assert _torch.missing_names() == ["gone"]
    with pytest.raises(ImportError, match=f"{re.escape(torch.__version__)} has no {place}.*2.11-2.13"):
        _torch.private("gone")


def dotted(node):
    """`a.b.c` as text, "" for what is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (start := dotted(node.value)):
        return f"{start}.{node.attr}"
    return ""


def torch_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield dotted(node)


def private_names(source):
    return {name for name in torch_names(ast.parse(source)) if is_private(name)}


def is_private(name):
    """Operators under `torch.ops` may be named with an underscore; they are of the public schema."""
    first, *rest = name.split(".")
    ours = first == "torch" and rest[:1] != ["ops"]
    return ours and any(part.startswith("_") and not part.endswith("__") for part in rest)


def test_files_use_no_private_torch_name():
    for path in FILES:
        assert private_names(path.read_text()) == set(), path


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._functorch import config",
        "from torch.utils import _pytree",
        "import torch\nx = torch._C._len_torch_dispatch_stack()",
        "import torch\nx = torch.nn.Module._call_impl",
    ],
)
def test_scan_finds(source):
    assert private_names(source)
