"""The headroom with which a compiled step came to fit its budget, for the next process.

A plan whose buffers do not fit is planned again with more of the budget left unused, and each round captures
the step again. A second process that begins with the headroom of the last round has that round's plan at
once, and finds the compiled graphs in Inductor's cache. A headroom is no promise: the buffers are looked at
as always, and where no plan is as small, it begins without one.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch import fx

from ..._torch import in_process_group
from ...files.kept_data import read_kept, write_kept
from ...stages import Asked

__all__ = ["key_of_step", "may_recall", "read_headroom", "write_headroom"]

FOLDER = "headroom"
MOST_DIGITS = 18


def may_recall(asked: Asked) -> bool:
    """Whether a step begins with what an earlier process has learnt.

    Not where ranks plan together, which might have learnt different things, nor where more is chosen from
    round to round than a headroom.
    """
    chosen = asked.options.split or asked.options.plan is not None or asked.sketched is not None
    return not (chosen or asked.headroom or asked.only_plan or in_process_group())


def key_of_step(asked: Asked, joint: fx.GraphModule) -> str:
    """What the rounds of a step depend on: its graph, what was asked for, and who plans and compiles it."""
    values = [node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")]
    shapes = [
        (value.dtype, tuple(value.shape), value.stride(), value.device)
        for value in values
        if isinstance(value, torch.Tensor)
    ]
    wanted = (repr(asked.options.budget), asked.options.method, asked.options.prices, asked.beside)
    return f"{_version()}|{wanted}|{shapes}|{joint.graph}"


def read_headroom(key: str) -> int:
    """The bytes to leave unused from the first round on; none where nothing is known."""
    data = read_kept(FOLDER, key, MOST_DIGITS)
    return int(data) if data is not None and data.isdigit() else 0


def write_headroom(key: str, headroom: int) -> None:
    """Keep the bytes of the round that fits."""
    write_kept(FOLDER, key, str(headroom).encode())


@cache
def _version() -> str:
    """Of torch and of Lowtide, by its sources."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
