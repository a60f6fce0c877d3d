"""What the command `lowtide` understands: its verbs, and the arguments and options of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import NoReturn

from .errors import LowtideError
from .solve import METHODS

__all__ = ["Verb", "parser_of"]

Verb = Callable[[argparse.Namespace], str]
"""Does what was asked for and gives what is to be printed."""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are told like all others."""

    def error(self, message: str) -> NoReturn:
        raise LowtideError(f"{message} (see {self.prog} --help)")


def parser_of(verbs: Mapping[str, Verb]) -> argparse.ArgumentParser:
    """The parser of the command line; what it parses has the chosen verb's function as `verb`."""
    from . import __version__

    parser = _Parser(prog="lowtide", description="Plan a training step under a byte cap.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    added = parser.add_subparsers(required=True, metavar="VERB")
    for name, (about, add_arguments) in VERBS.items():
        verb = added.add_parser(name, help=about, description=about)
        verb.set_defaults(verb=verbs[name])
        add_arguments(verb)
    return parser


def _add_capture(parser: argparse.ArgumentParser) -> None:
    step = "or FILE.py:FUNCTION; it returns model, *batch"
    parser.add_argument("step", metavar="MODULE:FUNCTION", help=step)
    place = "the file to write; - prints it"
    parser.add_argument("-o", "--output", required=True, metavar="GRAPH", help=place)
    parser.add_argument("--device", metavar="NAME", help="plan for a device that is not here, as in H200")
    parser.set_defaults(json=False)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_graph(parser)
    budget = 'bytes, as in 8GiB; a share of the vanilla peak, as in 50%%; or "min"'
    parser.add_argument("--budget", required=True, help=budget)
    parser.add_argument("--method", default="auto", help=f"{', '.join(METHODS)} (default: auto)")
    parser.add_argument("--report", metavar="HTML", help="write the plan as one HTML file")
    _add_output(parser, "plan")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_graph(parser)
    parser.add_argument("--budgets", default="70%,50%,35%,25%", help="(default: 70%%,50%%,35%%,25%%)")
    parser.add_argument("--methods", default=",".join(METHODS), help="(default: all)")
    _add_json(parser)


def _add_frontier(parser: argparse.ArgumentParser) -> None:
    _add_graph(parser)
    parser.add_argument(
        "--points", type=int, metavar="N", help="at most so many plans, evenly spread by peak"
    )
    _add_output(parser, "frontier")


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", metavar="GRAPH", help="a graph file; - reads standard input")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_output(parser: argparse.ArgumentParser, noun: str) -> None:
    _add_json(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help=f"write the {noun} as JSON")


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "capture": ("write the graph of a model's training step", _add_capture),
    "plan": ("find the fastest plan of a graph under a budget", _add_plan),
    "compare": ("what each method makes of a graph", _add_compare),
    "frontier": ("the plans of a graph that trade time for memory best", _add_frontier),
}
"""What each verb does, and what it takes."""
