"""Planning seconds of `auto` against the number of ops: transformers of unlike blocks, and unrolled LSTMs.

    python benchmarks/plan_times.py           # plans, writes results/plan_times.jsonl and docs/plan_times.svg
    python benchmarks/plan_times.py --plot    # the picture alone, from the results

The picture shows the transformers. Each size is planned in a process of its own, for half of the vanilla
peak. Seconds are those of the processor, so other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterable
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

import torch

from commit import commit
from drawing import DARK
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import METHODS
from synthetic import scaled, unrolled

SIZES = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
RECURRENT_SIZES = (5_000, 20_000, 50_000)
RESULTS = Path(__file__).parent / "results" / "plan_times.jsonl"
PICTURE = Path(__file__).parent.parent / "docs" / "plan_times.svg"

TRANSFORMER, RECURRENT = "transformer", "LSTM"

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 50, 30, 40, 50


def timed(size: int, kind: str) -> dict[str, Any]:
    """Plan a step of n ops."""
    graph = unrolled(size) if kind == RECURRENT else scaled(size, alike=False)
    vanilla = simulate(graph, keep_all(graph)).peak
    start = time.process_time()
    schedule = METHODS["auto"](graph, vanilla // 2)
    seconds = time.process_time() - start
    timeline = simulate(graph, schedule)
    fits = timeline.peak <= vanilla // 2
    facts = {"ops": len(graph.ops), "seconds": round(seconds, 3), "extra": timeline.extra if fits else None}
    more = {"kind": kind, "peak": timeline.peak, "vanilla": vanilla, "prices": graph.prices}
    return {**facts, **more, "torch": torch.__version__, "commit": commit()}


def run(sizes: Iterable[int], kind: str) -> list[dict[str, Any]]:
    """A line per size; a process each, so that none finds the memory or the plans of another."""
    lines = []
    for size in sizes:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            lines.append(pool.apply(timed, (size, kind)))
        print(f"{kind:12} {lines[-1]['ops']:7} ops {lines[-1]['seconds']:8.2f} s", flush=True)
    return lines


class Axis:
    """A logarithmic axis over whole decades, or halves of them, as pixels."""

    def __init__(self, values: Iterable[float], first: float, last: float) -> None:
        logs = [log10(value) for value in values]
        self.low, self.high = floor(2 * min(logs)) / 2, ceil(2 * max(logs)) / 2
        self.first, self.last = first, last

    def __call__(self, value: float) -> float:
        share = (log10(value) - self.low) / (self.high - self.low or 1)
        return round(self.first + share * (self.last - self.first), 1)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of each decade."""
        decades = range(floor(self.low), ceil(self.high) + 1)
        ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
        return [tick for tick in ticks if self.low <= log10(tick) <= self.high]


def picture(lines: list[dict[str, Any]]) -> str:
    """The plot as SVG: both axes logarithmic, and a dashed line for time in proportion to the ops."""
    points = [(line["ops"], max(line["seconds"], 1e-3)) for line in lines]
    first, (ops, seconds) = points[0][0], points[-1]
    straight = [(first, seconds * first / ops), (ops, seconds)]
    across = Axis((x for x, _ in points), LEFT, WIDTH - RIGHT)
    up = Axis((y for _, y in (*points, *straight)), HEIGHT - BOTTOM, TOP)
    curve, guide = (" ".join(f"{across(x)},{up(y)}" for x, y in found) for found in (points, straight))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#333">',
        DARK,
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *(vertical(across(x), f"{x:,.0f}") for x in across.ticks()),
        *(horizontal(up(y), f"{y:g}") for y in up.ticks()),
        f'<polyline points="{guide}" fill="none" stroke="#999" stroke-dasharray="5 4"/>',
        f'<polyline points="{curve}" fill="none" stroke="#1466b8" stroke-width="2"/>',
        *(f'<circle cx="{across(x)}" cy="{up(y)}" r="3.5" fill="#1466b8"/>' for x, y in points),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "ops of the step", "middle"),
        text(LEFT, TOP - 16, "seconds to plan (solid), in proportion to the ops (dashed)", "start"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def vertical(x: float, label: str) -> str:
    line = f'<line x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>'
    return line + text(x, HEIGHT - BOTTOM + 16, label, "middle")


def horizontal(y: float, label: str) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e4e4e4"/>'
    return line + text(LEFT - 6, y + 4, label, "end")


def text(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{label}</text>'


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="numbers of ops of transformers")
    parser.add_argument(
        "--recurrent", nargs="*", type=int, default=RECURRENT_SIZES, help="numbers of ops of LSTMs"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="the file of the plot")
    parser.add_argument("--plot", action="store_true", help="plot the results that are there")
    args = parser.parse_args(arguments)
    if not args.plot:
        rows = [*run(args.sizes, TRANSFORMER), *run(args.recurrent, RECURRENT)]
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    args.picture.write_text(picture([line for line in lines if line["kind"] == TRANSFORMER]))


if __name__ == "__main__":
    main()
