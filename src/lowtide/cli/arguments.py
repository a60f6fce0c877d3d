"""What the command `lowtide` understands: its verbs, and the arguments and options of each.

Nothing here, nor what it imports, imports torch or numpy: help and complaints come at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .. import __version__
from ..devices.table import find_device
from ..errors import LowtideError
from ..plans.json_format import MOST_FILE_BYTES, MOST_OPS
from ..plans.patience import PLANNING_SECONDS, check_seconds
from ..units import parse_budget

__all__ = ["EXECUTORS", "METHODS", "VERBS", "parse"]

METHODS = (
    "auto",
    "chain",
    "exact",
    "keep_all",
    "lower_sets",
    "lower_sets_approximate",
    "rotor",
    "sequence",
    "sqrt_segments",
)
"""The names in `lowtide.solve.METHODS`, which loads what it names."""

EXECUTORS = ("eager", "inductor")


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are told like all others."""

    def error(self, message: str) -> NoReturn:
        raise LowtideError(f"{message} (see {self.prog} --help)")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The verb and what was asked of it; raises `LowtideError` for what cannot be understood."""
    chosen = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    if getattr(chosen, "budget", None) is not None:
        parse_budget(chosen.budget)
    if getattr(chosen, "device", None) is not None:
        find_device(chosen.device)
    return chosen


def _joined(words: Sequence[str]) -> list[str]:
    """`--budget -5MiB` as `--budget=-5MiB`: argparse takes that word for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in ("--budget", "--budgets") and re.match(r"-[\d.]", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lowtide",
        usage="lowtide VERB ...",
        description="Any PyTorch training step under a byte cap.",
        epilog="lowtide VERB --help shows an example. Exit status: 0, 1 (it did not hold), 2 (bad input).",
    )
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    added = parser.add_subparsers(required=True, metavar="VERB", dest="verb", title="verbs")
    for name, (about, usage, example, add_arguments) in VERBS.items():
        verb = added.add_parser(
            name,
            prog=f"lowtide {name}",
            help=about,
            usage=f"lowtide {name} {usage}",
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"example:\n  lowtide {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_arguments(verb)
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=_count, default=20, metavar="N", help="training steps (default: 20)")
    share = "of the activation peak, as the cap (default: 0.4)"
    parser.add_argument("--share", type=float, default=0.4, help=share)
    folder = "where its report goes (default: demo-output)"
    parser.add_argument("--out", default="demo-output", metavar="FOLDER", help=folder)


def _add_capture(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="STEP", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    place = "the graph file to write; - prints it"
    parser.add_argument("-o", "--output", required=True, metavar="GRAPH", help=place)
    _add_of_a_step(parser)
    parser.set_defaults(json=False)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    _add_budget(parser, required=True)
    _add_method(parser)
    parser.add_argument("--report", metavar="HTML", help="write the plan as one HTML file")
    _add_of_a_step(parser)
    _add_split(parser)
    _add_output(parser, "plan")
    _add_bounds(parser)


def _add_compare(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    parser.add_argument("--budgets", default="70%,50%,35%,25%", help="(default: 70%%,50%%,35%%,25%%)")
    parser.add_argument("--methods", help="(default: all)")
    _add_of_a_step(parser)
    _add_json(parser)
    _add_bounds(parser)


def _add_frontier(parser: argparse.ArgumentParser) -> None:
    _add_source(parser)
    points = "at most N plans, evenly spread by peak"
    parser.add_argument("--points", type=_points, metavar="N", help=points)
    _add_of_a_step(parser)
    _add_output(parser, "frontier")
    _add_bounds(parser)


def _add_report(parser: argparse.ArgumentParser) -> None:
    source = "a plan file, a graph file, - for standard input, or FILE.py:FUNCTION"
    parser.add_argument("source", metavar="SOURCE", help=source)
    place = "the HTML file to write; - prints it"
    parser.add_argument("-o", "--output", required=True, metavar="HTML", help=place)
    _add_budget(parser, required=False)
    _add_method(parser)
    _add_of_a_step(parser)
    _add_bounds(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", metavar="STEP", help="FILE.py:FUNCTION or MODULE:FUNCTION")
    _add_budget(parser, required=True)
    _add_method(parser)
    _add_executor(parser)
    _add_split(parser)
    _add_batch_size(parser)
    _add_json(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    _add_json(parser)


def _add_batch(parser: argparse.ArgumentParser) -> None:
    step = "FILE.py:FUNCTION or MODULE:FUNCTION; it takes the batch size"
    parser.add_argument("step", metavar="STEP", help=step)
    budget = "24GiB; '90%% of device' (of its memory); or free"
    parser.add_argument("--budget", required=True, metavar="BYTES", help=budget)
    _add_method(parser)
    _add_device(parser)
    _add_executor(parser)
    _add_optimizer(parser)
    most = "look no further than this batch (default: 65536)"
    parser.add_argument("--most", type=_count, default=65536, metavar="N", help=most)
    _add_json(parser)


def _add_source(parser: argparse.ArgumentParser) -> None:
    source = "a graph file, - (standard input) or FILE.py:FUNCTION"
    parser.add_argument("source", metavar="SOURCE", help=source)


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    """Bounds that few will meet: the help stays on one screen, and the errors and the docs name them."""
    for name, kind, default in (
        ("--most-bytes", _bytes, MOST_FILE_BYTES),
        ("--most-ops", _count, MOST_OPS),
        ("--planning-seconds", _seconds, PLANNING_SECONDS),
    ):
        parser.add_argument(name, type=kind, default=default, help=argparse.SUPPRESS)


def _add_budget(parser: argparse.ArgumentParser, *, required: bool) -> None:
    budget = "8GiB; 50%% (of peak); '90%% of device'; free; min; knee"
    parser.add_argument("--budget", required=required, metavar="BYTES", help=budget)


def _add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", default="auto", type=_method, help="the solver (default: auto)")


def _add_of_a_step(parser: argparse.ArgumentParser) -> None:
    _add_device(parser)
    _add_executor(parser)
    _add_optimizer(parser)
    inside = "let --optimizer step inside of the backward"
    parser.add_argument("--step-in-backward", action="store_true", default=None, help=inside)
    _add_batch_size(parser)
    _add_ranks(parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    ranks = "plan one of N ranks that share the parameters"
    parser.add_argument("--ranks", type=_ranks, metavar="N", help=ranks)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="NAME", help="plan for a device that is not here, as in H200")


def _add_executor(parser: argparse.ArgumentParser) -> None:
    executor = "how the step runs: eager (default) or inductor"
    parser.add_argument("--executor", choices=EXECUTORS, metavar="NAME", help=executor)


def _add_split(parser: argparse.ArgumentParser) -> None:
    split = "let head and MLPs run in (N) chunks of rows"
    parser.add_argument("--split", nargs="?", const=True, type=_chunks, metavar="N", help=split)


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    optimizer = "count the state of this optimizer, as in AdamW"
    parser.add_argument("--optimizer", metavar="NAME", help=optimizer)


def _add_batch_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-size", type=_count, metavar="N", help="call FUNCTION(N) instead of FUNCTION()"
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def _add_output(parser: argparse.ArgumentParser, noun: str) -> None:
    _add_json(parser)
    parser.add_argument("-o", "--output", metavar="OUT", help=f"write the {noun} as JSON")


def _method(name: str) -> str:
    """A method's name; argparse would tell of an unknown one without the next step."""
    if name not in METHODS:
        raise LowtideError(f"method {name!r} is not known; choose one of {', '.join(METHODS)}")
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def _bytes(text: str) -> int:
    size = parse_budget(text).bytes
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 1GiB")
    return size


def _seconds(text: str) -> float:
    try:
        return check_seconds(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None


def _chunks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of chunks, which is 2 or more")
    return int(text)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"ranks {text!r} must be a whole number >= 2: the GPUs that share the parameters"
        )
    return int(text)


def _points(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"points {text!r} must be a whole number >= 2: a frontier has two ends"
        )
    return int(text)


Adds = Callable[[argparse.ArgumentParser], None]

VERBS: dict[str, tuple[str, str, str, Adds]] = {
    "demo": (
        "train a small language model uncapped and capped, and compare",
        "[options]",
        "--steps 5",
        _add_demo,
    ),
    "capture": (
        "write the graph of a training step to a file",
        "STEP -o GRAPH [options]",
        "model.py:make_step --device H200 -o g.json",
        _add_capture,
    ),
    "plan": (
        "find the fastest plan of a step under a budget",
        "SOURCE --budget BYTES [options]",
        "model.py:make_step --budget 8GiB --report plan.html",
        _add_plan,
    ),
    "compare": (
        "what each method makes of a step",
        "SOURCE [options]",
        "g.json --budgets 60%,40% --methods auto,rotor",
        _add_compare,
    ),
    "frontier": (
        "the plans that trade time for memory best",
        "SOURCE [options]",
        "model.py:make_step --device A100 --points 8",
        _add_frontier,
    ),
    "report": (
        "write a plan as one HTML file",
        "SOURCE -o HTML [options]",
        "plan.json -o plan.html",
        _add_report,
    ),
    "verify": (
        "run a step with and without a cap and compare them bit by bit",
        "STEP --budget BYTES [options]",
        "model.py:make_step --budget 50%",
        _add_verify,
    ),
    "batch": (
        "find the largest batch that fits a budget, capped and uncapped",
        "STEP --budget BYTES [options]",
        "model.py:make_step --budget 24GiB --optimizer AdamW",
        _add_batch,
    ),
    "doctor": (
        "what works here: versions, devices, compilers, caches",
        "[options]",
        "--json",
        _add_doctor,
    ),
}
"""What each verb does, how it is called, an example, and what it takes."""
