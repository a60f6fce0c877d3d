"""The marks of sketches in a captured step: which inputs may be sketched, for which layers, and what for.

A mark is one input of sketched layers: `lowtide::compress` in the forward of the joint graph, and one
`lowtide::weight_gradient` in the backward for each layer that reads it. Where only some rows get a gradient,
and take no more bytes than a sketch, these rows are kept in its place, and the weight gradients are exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from ..capture.fx_nodes import depends_on, storage_of, tensors_of
from ..capture.lift import module_path
from .gradient_rows import Mask, Part, gradient_rows, part_of
from .kinds import KINDS
from .layers import shown
from .marker import COMPRESS, WEIGHT_GRADIENT

__all__ = ["Mark", "find_marks", "has_marks", "of_layers", "ranked"]

_ROUNDING_NOISE = {"int8": 0.0004, "int4": 0.1}
"""In variances of SGD, the medians of what benchmarks/sketch_glue.py measures (`noise` in its rows)."""


@dataclass(frozen=True)
class Mark:
    """One input that may be sketched: its nodes by name, the storage it lies in, the layers that read it.

    `saved` are the bytes by which a sketch is smaller than the input, 0 where the input is there in the
    backward anyway; `noise` is a guess, in variances of SGD, summed over the layers. `part` are the rows
    that are kept in place of a sketch, where they will do.
    """

    compress: str
    gradients: tuple[str, ...]
    layers: tuple[str, ...]
    storage: int
    saved: int
    noise: float
    part: Part | None = None


def has_marks(graph: fx.Graph) -> bool:
    """Whether there are any in a joint graph."""
    return bool(graph.find_nodes(op="call_function", target=COMPRESS))


def find_marks(graph: fx.Graph) -> list[Mark]:
    """The marks of a joint graph without idle views, in its order."""
    there, rows = _there_anyway(graph), gradient_rows(graph)
    compressed = graph.find_nodes(op="call_function", target=COMPRESS)
    marks = [_mark(node, there, rows) for node in compressed]
    exact = {mark for group in _groups(marks) if all(mark.part for mark in group) for mark in group}
    return [
        mark if mark in exact else _mark(node, there, {})
        for mark, node in zip(marks, compressed, strict=True)
    ]


def of_layers(marks: Sequence[Mark], layers: Collection[str]) -> list[Mark]:
    """The marks of some layers by their names."""
    return [mark for mark in marks if any(layer in layers for layer in mark.layers)]


def ranked(marks: Sequence[Mark], seconds: Mapping[int, float]) -> list[tuple[str, ...]]:
    """Layers of which a sketch saves something, those first whose sketch is worth least.

    Its worth is what recomputing the input would cost, in `seconds` by storage, for its noise; of equal
    ones, that of the last layers is least, since what those keep is used up soonest in the backward. Layers
    that have a mark in common are chosen together, and so are all calls of a layer.
    """
    worths: dict[tuple[str, ...], float] = {}
    for group in _groups(marks):
        saved, noise = (sum(getattr(mark, name) for mark in group) for name in ("saved", "noise"))
        if saved > 0:
            layers = tuple(dict.fromkeys(layer for mark in group for layer in mark.layers))
            worths[layers] = sum(seconds.get(mark.storage, 0.0) for mark in group) / max(noise, 1e-9)
    last_first = list(reversed(worths))
    return sorted(last_first, key=worths.__getitem__)


def _groups(marks: Sequence[Mark]) -> list[list[Mark]]:
    """Marks by what connects them: a layer that is called twice has two."""
    groups: list[list[Mark]] = []
    for mark in marks:
        near = [group for group in groups if any({*mark.layers} & {*other.layers} for other in group)]
        groups = [group for group in groups if group not in near]
        groups.append([*(other for group in near for other in group), mark])
    return groups


def _there_anyway(graph: fx.Graph) -> set[int]:
    """The storages of what is there in the backward without a mark: inputs, outputs, what else it reads."""
    given = graph.find_nodes(op="placeholder")
    backward = depends_on(graph, [node for node in given if "tangents" in node.name])
    readers = [node for node in graph.nodes if node in backward or node.op == "output"]
    nodes = [*given, *(parent for reader in readers for parent in reader.all_input_nodes)]
    return {storage_of(tensor) for node in nodes for tensor in tensors_of(node)}


def _mark(compress: fx.Node, there: set[int], rows: Mapping[fx.Node, Mask]) -> Mark:
    x, _, kind, k, _ = compress.args
    users = [user for item in compress.users for user in item.users]
    gradients = dict.fromkeys(user for user in users if user.target is WEIGHT_GRADIENT)
    value = x.meta["val"]  # type: ignore[union-attr]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(compress))
    noise = value.shape[0] / k - 1 if KINDS[kind].has_rate else _ROUNDING_NOISE[kind]  # type: ignore[index,operator]
    part = _part([rows.get(node.args[0]) for node in gradients])  # type: ignore[arg-type]
    if part is not None:
        few = part.rows(value.shape[0]) * value.shape[1] * value.element_size()
        part, kept, noise = (part, few, 0.0) if few <= kept else (None, kept, noise)
    return Mark(
        compress=compress.name,
        gradients=tuple(node.name for node in gradients),
        layers=tuple(_layer(node) for node in reversed(gradients)),
        storage=storage_of(value),
        saved=0 if storage_of(value) in there else value.untyped_storage().nbytes() - kept,
        noise=noise * len(gradients),
        part=part,
    )


def _part(rows: Sequence[Mask | None]) -> Part | None:
    """The part that the rows of several gradients are together."""
    known = [mask for mask in rows if mask is not None]
    return part_of(np.logical_or.reduce(known)) if known and len(known) == len(rows) else None


def _layer(gradient: fx.Node) -> str:
    """The name of the layer; in a second call, torch.compile knows it as what its `forward` holds."""
    return shown(module_path(gradient).removesuffix("forward.args.0").removesuffix("."))
