"""Private torch names: each is listed in one file, exists, and is used; no other file reaches for one."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide import _torch

ROOT = Path(lowtide.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT / "_torch"]


def test_names_exist():
    for name in _torch.missing_names():
        place, versions = _torch.NAMES[name]
        pytest.fail(
            f"torch {torch.__version__} has no {place}, seen in torch {versions}: find what took its place, "
            "and correct lowtide/_torch/names.py"
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


@pytest.mark.slow
def test_files_use_no_private_torch_name():
    for path in FILES:
        assert private_names(path.read_text()) == set(), path


def private_attributes(source):
    """Private attributes of objects that are not of the file itself: of torch's, unless the tables say else.

    Operators are named with an underscore in the public schema; `_replace` and the like are namedtuples', and
    `_at_fork_reinit` is what Python's own modules call on their locks in a forked child.
    """
    tree = ast.parse(source)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own |= {node.target.id for node in ast.walk(tree) if is_field(node)}
    own |= {node.attr for node in ast.walk(tree) if is_of_self(node)} | {"_asdict", "_replace", "_fields"}
    own |= {"_is_owned", "_at_fork_reinit"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_operator(node):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr", "setattr"):
            found |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return {name for name in found - own if name.startswith("_") and not name.startswith(("__", "_lowtide"))}


def is_field(node):
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def is_of_self(node):
    return isinstance(node, ast.Attribute) and dotted(node.value) in ("self", "cls")


def is_operator(node):
    return dotted(node.value).startswith(("torch.ops.", "aten"))


@pytest.mark.slow
def test_no_file_uses_a_private_attribute_of_torchs_objects():
    found = {str(path.relative_to(ROOT)): private_attributes(path.read_text()) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "key = storage._cdata",
        "first = tensor.grad_fn._sequence_nr()",
        "model._compiled_call_impl = None",
        "hooks = getattr(parameter, '_backward_hooks', None)",
        "def f(x):\n    return x.y._version",
    ],
)
def test_scan_finds_attributes(source):
    assert private_attributes(source)


def attributes_asked_for(tree):
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {call.args[1].value for call in calls if dotted(call.func) in ("private_of", "set_private")}


@pytest.mark.slow
def test_every_attribute_of_the_list_is_used():
    used = {name for path in FILES for name in attributes_asked_for(ast.parse(path.read_text()))}
    assert used | {"storage_key"} == set(_torch.ATTRIBUTES)  # which has a function of its own


@functools.cache
def sharded_linear():
    """A layer that `fully_shard` was called on, after a call, in a group of this one process."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from conftest import keep_for_ever

    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    keep_for_ever(distributed.group.WORLD)
    layer = fully_shard(torch.nn.Linear(2, 2))
    assert isinstance(layer, FSDPModule)
    layer(torch.ones(1, 2)).sum().backward()
    distributed.destroy_process_group()
    return layer


def sharded_parameter():
    state = sharded_linear()._get_fsdp_state()
    return state._fsdp_param_group.fsdp_params[0]


INSTANCES = {
    "torch.distributed.fsdp:FSDPModule": sharded_linear,
    "the state of an FSDPModule": lambda: sharded_linear()._get_fsdp_state(),
    "a parameter of FSDP": sharded_parameter,
    "torch:Tensor": lambda: torch.ones(1),
    "torch:UntypedStorage": torch.UntypedStorage,
    "torch.autograd.graph:Node": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "torch.nn:Module": torch.nn.Module,
    "torch.nn:Linear": lambda: torch.nn.Linear(1, 1),
    "torch.nn:LSTM": lambda: torch.nn.LSTM(1, 1),
    "torch.nn:BatchNorm1d": lambda: torch.nn.BatchNorm1d(1),
    "torch._ops:OpOverload": lambda: torch.ops.aten.add.Tensor,
    "the function that torch.compile returns": lambda: torch.compile(lambda x: x),
    "the module that torch.compile returns": lambda: torch.compile(torch.nn.Linear(1, 1)),
}


@pytest.mark.parametrize("name", _torch.ATTRIBUTES)
def test_attribute_exists(name):
    attribute, owner, versions = _torch.ATTRIBUTES[name]
    if "-" not in versions and not torch.__version__.startswith(versions):
        pytest.skip(f"of torch {versions} alone")
    assert hasattr(INSTANCES[owner](), attribute), (
        f"torch {torch.__version__} has no {attribute} at {owner}, seen in torch {versions}: find what took "
        "its place, and correct lowtide/_torch/names.py"
    )


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
