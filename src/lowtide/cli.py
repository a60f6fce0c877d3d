"""The command `lowtide`: capture a graph, plan it, compare methods on it, draw its frontier.

`capture` alone needs the model; the graph file that it writes is all that the other verbs read. Standard
output carries the result and nothing else, progress and errors go to standard error. The exit status is 0, or
2 with one paragraph that says what was wrong, or 130 after an interrupt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

from .arguments import Verb, parser_of
from .compare import compare
from .errors import FormatError, LowtideError
from .frontier import Frontier, frontier, size_of
from .graph import Graph
from .plan import Plan, _write, make_plan
from .progress import bar
from .report.page import page
from .report.text import text
from .shortfall import too_small
from .solve import find_method
from .solve.keep_all import keep_all
from .steps import capture_step
from .units import Budget, format_bytes, parse_budget

__all__ = ["main"]

INTERRUPTED = 130
PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    try:
        chosen = parser_of(VERBS).parse_args(arguments)
        for path in (getattr(chosen, "output", None), getattr(chosen, "report", None)):
            _check_place(path)
        _print(chosen.verb(chosen))
    except LowtideError as error:
        print(f"lowtide: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return PIPE_CLOSED
    return 0


def _capture(chosen: argparse.Namespace) -> str:
    with redirect_stdout(sys.stderr):  # whatever the model's code prints is not the result
        plan = capture_step(chosen.step, chosen.device)
    lines = [str(plan.graph), f"uncapped peak {format_bytes(plan.peak)}"]
    return _deliver(plan.graph, "\n".join(lines + [f"note: {note}" for note in plan.notes]), chosen)


def _plan(chosen: argparse.Namespace) -> str:
    plan = _plan_under(_read_graph(chosen.graph), parse_budget(chosen.budget), chosen.method).with_bound()
    if chosen.report is not None:
        _save(chosen.report, page(plan))
    return _deliver(plan, text(plan), chosen)


def _plan_under(graph: Graph, asked: Budget, method: str) -> Plan:
    solve = find_method(method)
    if asked.word == "min":
        return make_plan(graph, solve(graph, 0), method=method)
    vanilla = make_plan(graph, keep_all(graph), method="keep_all")
    size = size_of(asked, vanilla.peak)
    if vanilla.peak <= size:
        return replace(vanilla, budget=size)
    for room in (size, 0):
        plan = make_plan(graph, solve(graph, room), method=method, budget=size)
        if plan.peak <= size:
            return plan
    raise too_small(plan, asked, size)


def _compare(chosen: argparse.Namespace) -> str:
    graph = _read_graph(chosen.graph)
    methods, budgets = _listed(chosen.methods, "--methods"), _listed(chosen.budgets, "--budgets")
    with bar() as progress:
        found = compare(graph, methods, budgets, progress=progress)
    return found.to_json() if chosen.json else str(found)


def _listed(text: str, option: str) -> list[str]:
    """The distinct items of a comma-separated option."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise LowtideError(f"{option} {text!r} has an empty item; separate the items by single commas")
    return list(dict.fromkeys(items))


def _frontier(chosen: argparse.Namespace) -> str:
    graph = _read_graph(chosen.graph)
    with bar("frontier") as progress:
        found = frontier(graph, points=chosen.points, progress=progress)
    return _deliver(found, str(found), chosen)


VERBS: dict[str, Verb] = {"capture": _capture, "plan": _plan, "compare": _compare, "frontier": _frontier}


def _deliver(made: Graph | Plan | Frontier, text: str, chosen: argparse.Namespace) -> str:
    """Write the JSON form where it was asked for, and give what is to be printed."""
    if chosen.output not in (None, "-"):
        _save(chosen.output, made.to_json())
    return made.to_json() if chosen.json or chosen.output == "-" else text


def _read_graph(path: str) -> Graph:
    name = "standard input" if path == "-" else path
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return Graph.from_json(data.decode("utf-8-sig"))
    except OSError as error:
        raise LowtideError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{name}: not a graph file: it is not UTF-8 text") from None
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def _check_place(path: str | None) -> None:
    """Refuse a place that cannot be written to before the work, not after it."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise LowtideError(f"cannot write {path}: it is a folder")
    if not Path(path).parent.is_dir():
        raise LowtideError(f"cannot write {path}: there is no folder {Path(path).parent}")


def _save(path: str, text: str) -> None:
    try:
        _write(Path(path), text)
    except OSError as error:
        raise LowtideError(f"cannot write {path}: {error.strerror}") from None


def _print(text: str) -> None:
    """Print the result; characters that the terminal does not know become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.rstrip("\n").encode(encoding, "replace").decode(encoding), flush=True)
    except OSError as error:
        # What is left in the buffer would be tried again, and complained about, at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise LowtideError(f"cannot write the result: {error.strerror}") from None
