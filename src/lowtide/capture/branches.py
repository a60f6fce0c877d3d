"""Branches on the data of a batch, taken as plain PyTorch takes them.

torch's front end traces a step without looking at values. At `if mask.all():` it stops, and models that know
this ask whether they are traced and take another road then: another kernel, other roundings. Lowtide
captures a step with its batch at hand, so such a branch can be answered by the batch itself. The answer is
marked in the graph, is asked again before each call, and where it is another one the call has a graph of its
own (`conditions`).

That is sound where the condition is computed from the batch and from buffers alone, before anything writes
to them: then it is the same before the step as at the branch. Writes to what the step itself has made are
made again (`asked_nodes`). What comes of parameters is not asked, since
it would be computed twice; nor are floating point results, which autocast may round, but for the arithmetic
that makes a mask of floats of one of whole numbers. Of random numbers only those are known that are drawn on
the host and compared with a rate (`compared_draws`): all that the step draws before is drawn for them, and
put back (`redraws`).
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import (
    SYMBOLIC,
    branches_answered,
    calls_looked_at,
    drawn_from,
    generators_traced,
    hint,
    private,
    storage_key,
    traced_input,
    traced_value,
    with_generator,
)
from ..process_wide import here
from ..torch_state.random_state import look_at_state, put_state
from .asked_nodes import all_writes_known, changed, what_it_reads
from .compared_draws import decided, is_drawn_on_host
from .conditions import answers_of, mark, question
from .grouped_products import any_grouped_product
from .known_sizes import with_known_size
from .module_hooks import hooks_followed
from .plain_masks import makes_masks, masks_as_plain

__all__ = ["Branches", "answering_branches", "following_branches"]

WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Dtypes whose results nobody rounds."""

EXACT = (torch.full, torch.zeros, torch.ones, torch.triu, torch.tril)
"""Calls that compute nothing: torch's own Transformer compares a mask with a causal one that it makes so."""


FLOAT_MASKS = (
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.getitem, torch.where),
    *("to", "float", "type", "mul", "sub", "masked_fill", "clone", "contiguous"),
    *("unsqueeze", "squeeze", "flatten", "view", "expand", "masked_fill_", "fill_"),
)
"""Calls on tensors that autocast has no rule for, and that compute each number by itself or none:
`(1 - mask) * -10000`, which Longformer compares with zero."""


class _Present(threading.local):
    branches: Branches | None = None


_present = _Present()


@dataclass
class Branches:
    """What is known of the branches of one capture.

    Whether one was taken without data, for no padding; whether one was taken as the random state says.
    """

    unpadded: bool = False
    drawn: bool = False


@contextmanager
def following_branches(*, on: bool = True) -> Iterator[Branches]:
    """Take branches as the batch says in what this thread captures meanwhile (`answering_branches`)."""
    found = Branches()
    if not on:
        yield found
        return
    with (
        here(_present, branches=found),
        masks_as_plain(),
        any_grouped_product(),
        hooks_followed(),
        generators_traced(),
        calls_looked_at(_look),
    ):
        yield found


def _look(node: fx.Node) -> None:
    """What is changed of a call before it is tried."""
    with_known_size(node, _told)
    with_generator(node)


def answering_branches() -> AbstractContextManager[None]:
    """Let torch's front end ask at branches, for as long as it captures."""
    return branches_answered(_answer)


def _answer(module: str, condition: fx.Node) -> bool | None:
    """Which way a branch goes; None where that cannot be told, and torch's front end stops."""
    branches = _present.branches
    if branches is None:
        return None
    if (certain := decided(condition)) is not None:
        return certain
    if is_drawn_on_host(condition):
        branches.drawn = True
        return _drawn(condition)
    nodes = what_it_reads([condition])
    if not _is_of_inputs(condition, nodes):
        return False if makes_masks(module) else None
    inputs = _inputs(nodes)
    if any(_has_no_data(item) for item in inputs):
        branches.unpadded |= makes_masks(module)
        return True if makes_masks(module) else None
    told = _asked(condition, inputs)
    if told is None:
        return False if makes_masks(module) else None
    (answer,) = answers_of((told,))
    if inputs:  # what is made of nothing says the same at every call
        condition.graph.call_function(mark, (condition, answer))
    return answer


def _drawn(condition: fx.Node) -> bool | None:
    """What a drawn number is going to say; None where what is drawn before it is not known."""
    asked = question([condition])
    if asked is None:
        return None
    before = look_at_state("cpu")
    try:
        (answer,) = answers_of(asked[0]())
    finally:
        put_state(before, "cpu")
    condition.graph.call_function(mark, (condition, answer))
    return answer


def _told(asked: fx.Node) -> torch.Tensor | None:
    """What the batch says of a tensor that a size depends on; None where that cannot be told."""
    branches: Branches | None = getattr(_present, "branches", None)
    if branches is None:
        return None
    nodes = what_it_reads([asked])
    inputs = _inputs(nodes)
    if not _comes_of_inputs(nodes) or any(_has_no_data(item) for item in inputs):
        return None
    return _asked(asked, inputs)


def _inputs(nodes: list[fx.Node]) -> list[Any]:
    """What the inputs among some nodes are in the call that is traced; for a size its number."""
    found = [traced_input(node) for node in nodes if node.op == "placeholder"]
    return [hint(item) if isinstance(item, SYMBOLIC) else item for item in found]


def _is_of_inputs(condition: fx.Node, nodes: list[fx.Node]) -> bool:
    """Whether a condition is the same when it is asked before the step."""
    value = traced_value(condition)
    return isinstance(value, torch.Tensor) and value.numel() == 1 and _comes_of_inputs(nodes)


def _comes_of_inputs(nodes: list[fx.Node]) -> bool:
    """Whether nodes, with all that they read, give the same when they are asked for before the step."""
    if private("functorch_level")() is not None:  # what torch.func has wrapped exists inside of it alone
        return False
    if any(map(drawn_from, nodes)):  # asking would draw
        return False
    if any(not _is_input(node) if node.op == "placeholder" else not _is_whole(node) for node in nodes):
        return False
    written = {key for node in nodes[0].graph.find_nodes(op="placeholder") for key in _written(node)}
    inputs = [node for node in nodes if node.op == "placeholder"]
    if any(map(changed, inputs)) or not all_writes_known(nodes):
        return False
    return written.isdisjoint(key for node in inputs for key in _storage(traced_input(node)))


def _is_input(node: fx.Node) -> bool:
    """Whether a placeholder is a size, or a plain tensor that is not trained, nor part of what is."""
    item = traced_input(node)
    if isinstance(item, SYMBOLIC):
        return hint(item) is not None
    plain = type(item) in (torch.Tensor, private("FakeTensor"))
    return plain and not item.requires_grad and not isinstance(item, torch.nn.Parameter)


def _is_whole(node: fx.Node) -> bool:
    """Whether a node calls something that returns whole numbers or flags, or that autocast leaves alone."""
    if node.target is operator.setitem:
        return True  # copies what is among the nodes, too
    values = private("tree_leaves")(traced_value(node))
    exact = node.target in EXACT or node.target in FLOAT_MASKS
    calls = node.op in ("call_function", "call_method")
    return calls and bool(values) and all(_is_exact(value, exact) for value in values)


def _is_exact(value: Any, exact: bool) -> bool:
    if isinstance(value, torch.Tensor):
        return exact or value.dtype in WHOLE
    return isinstance(value, int | torch.SymInt | torch.SymBool)


def _written(node: fx.Node) -> Iterator[int]:
    """The storage of an input that was written to."""
    if changed(node):
        yield from _storage(traced_input(node))


def _storage(item: Any) -> Iterator[int]:
    if type(item) is torch.Tensor and item.layout == torch.strided:
        yield storage_key(item)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in private("tree_leaves")(value) if isinstance(v, torch.Tensor)]


def _has_no_data(item: Any) -> bool:
    return isinstance(item, private("FakeTensor")) or (isinstance(item, torch.Tensor) and item.is_meta)


def _asked(node: fx.Node, inputs: list[Any]) -> torch.Tensor | None:
    """What the batch says; None where that draws random numbers, or fails."""
    device = str(traced_value(node).device)
    devices = {"cpu", device} & {"cpu", "cuda", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))}
    before = {device: look_at_state(device) for device in devices}
    asked = question([node])
    try:
        with torch.no_grad():
            (told,) = asked[0](*inputs) if asked is not None else (None,)
    except Exception:  # the front end tells what is wrong with it
        return None
    drawn = [device for device, state in before.items() if not torch.equal(state, look_at_state(device))]
    for device in drawn:
        put_state(before[device], device)
    return None if drawn else told
