"""The files that verbs read and write: errors name the file, and a file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import FormatError, LowtideError
from ...plans import json_format
from ...plans.graph import Graph
from ...plans.planned_step import Plan, _write

__all__ = ["check_place", "read_graph", "read_graph_or_plan", "save"]


def read_graph(path: str, *, most_bytes: int, most_ops: int) -> Graph:
    """The graph in a file; `-` is standard input."""
    with _named(path):
        data = json_format.parse(_text(path, "graph", most_bytes), "graph")
        if isinstance(data, dict) and data.get("lowtide") == "plan":
            raise FormatError(
                "it is a plan: lowtide report shows it; name the step or its graph to plan it anew"
            )
        return Graph.from_dict(data, most_ops=most_ops)


def read_graph_or_plan(path: str, *, most_bytes: int, most_ops: int) -> Graph | Plan:
    """The plan in a file, or the graph in a graph file."""
    with _named(path):
        data = json_format.parse(_text(path, "plan", most_bytes), "plan")
        kind = Graph if isinstance(data, dict) and data.get("lowtide") == "graph" else Plan
        return kind.from_dict(data, most_ops=most_ops)


def _text(path: str, noun: str, most_bytes: int) -> str:
    try:
        data = json_format.read_bytes(path, noun, most_bytes)
    except LowtideError:
        raise
    except (OSError, ValueError) as error:  # the latter of a name that no file can have
        raise LowtideError(f"cannot read {_name(path)}: {_reason(error)}") from None
    return json_format.decode(data, noun)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the file's name before what is wrong in it."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{_name(path)}: {error}") from None


def _name(path: str) -> str:
    return "standard input" if path == "-" else path


def check_place(path: str | None) -> None:
    """Refuse a place that cannot be written to before the work, not after it."""
    if path is None or path == "-":
        return
    if os.path.isdir(path):
        raise LowtideError(f"cannot write {path}: it is a folder")
    if not os.path.isdir(Path(path).parent):
        raise LowtideError(f"cannot write {path}: there is no folder {Path(path).parent}")


def save(path: str, text: str) -> None:
    """Write a file, whole or not at all."""
    try:
        _write(Path(path), text)
    except (OSError, ValueError) as error:
        raise LowtideError(f"cannot write {path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
