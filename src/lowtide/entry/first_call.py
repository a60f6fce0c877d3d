"""Steps whose first call installs things: hooks under a lock, caches, tables, buffers.

torch cannot capture some of that. So where a capture fails, the step is run plainly and captured once more.
It is run twice, each time from the same tensors and random state: what the second run leaves alone is what
the first one installed, and stays; what both change (a counter, BatchNorm's statistics) is put back, and the
captured step will do it. Where the two give other results, the first call is not like later ones, and no
capture of a later call may stand for it. Nothing is saved for a backward in these runs, so a step that asks
for gradients itself cannot be run so; parameters are copied only where the step writes to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import inner_tensors, private
from ..measuring.module_state import Attributes, Tensors, bytes_of, host_copy, is_tensor
from ..torch_state.dispatch_modes import without_foreign_modes

__all__ = ["BackwardInside", "install", "may_install"]

_leaves = private("tree_leaves")


class BackwardInside(Exception):  # noqa: N818  # not an error of the step
    """Raised where a step computes gradients itself, in a run that keeps nothing for them."""


def may_install(modules: list[torch.nn.Module], inputs: Any) -> bool:
    """Whether a step may be run plainly for what its first call installs.

    Not where it would use up an iterator, under transforms of torch.func, nor with DistributedDataParallel
    inside, which waits for a backward after each call.
    """
    if private("functorch_level")() is not None or not private("saving_hooks_allowed")():
        return False
    if any(hasattr(leaf, "__next__") for leaf in _leaves(inputs)):
        return False
    parts = [part for module in modules for part in module.modules()]
    return not any(isinstance(part, torch.nn.parallel.DistributedDataParallel) for part in parts)


def install(call: Callable[[], Any], modules: list[torch.nn.Module], inputs: Any) -> str | None:
    """Let the first call of a step install what it does; gives that in words, or None.

    None where the first call does not do what the next ones do: the step is as it was then.
    What the step itself raises is raised, and BackwardInside of a step that cannot be run so.
    """
    before = Attributes(modules)
    state = Tensors(modules, [*before.tensors(), *(t for t in _leaves(inputs) if is_tensor(t))])
    try:
        first, second = (_run(call, state, modules) for _ in range(2))
    except BaseException:
        state.restore()
        before.restore()
        raise
    (results, after), (again, later) = first, second
    installed = before.changed(after)
    each_time = after.changed(later)
    carried = any(tensor.grad_fn is not None for tensor in after.tensors())
    if carried or not _same(results, again):
        before.restore()
        return None
    before.restore(each_time)
    return _in_words(installed - each_time)


def _run(
    call: Callable[[], Any], state: Tensors, modules: list[torch.nn.Module]
) -> tuple[list[Any], Attributes]:
    """Run the step with nothing saved for a backward: its results on the host, and what modules hold then."""
    with without_foreign_modes(), state.watch(), _saving_nothing():
        output = call()
    results = [host_copy(tensor) for leaf in _leaves(output) for tensor in inner_tensors(leaf).values()]
    results += state.found()
    state.restore()
    return results, Attributes(modules)


def _saving_nothing() -> Any:
    def unpack(_: Any) -> Any:
        raise BackwardInside

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack)


_TABLES = {
    "_buffers": "makes buffers",
    "_parameters": "makes parameters",
    "_modules": "makes modules",
}


def _in_words(changed: set[tuple[torch.nn.Module, str]]) -> str:
    names = sorted({name for _, name in changed})
    if any("_hooks" in name for name in names):
        return "installs hooks"
    for table, words in _TABLES.items():
        if table in names:
            return words
    return f"sets {names[0]!r}" if names else "prepares something that torch cannot capture"


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(_equal, left, right))


def _equal(left: Any, right: Any) -> bool:
    if not (is_tensor(left) and is_tensor(right)):
        return bool(left == right)
    if (left.shape, left.dtype, left.layout) != (right.shape, right.dtype, right.layout):
        return False
    return left.layout != torch.strided or torch.equal(bytes_of(left), bytes_of(right))
