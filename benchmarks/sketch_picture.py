"""The picture of sketches: what a linear layer keeps of its input, against the noise of its weight gradient.

Noise is the expected squared distance of the sketched gradient from the exact one, in variances that the
gradient of such a batch has anyway. Lines are the closed forms of `lowtide.sketching`, dots are measured:
gradients from sketches that were made, in double precision, so that the same code gives the same picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from drawing import RULES, document, legend_lines
from lowtide.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from lowtide.sketching.kind import Kind
from lowtide.sketching.kinds import KINDS
from lowtide.sketching.moments import moments

ROWS, FEATURES, OUTPUTS = 512, 256, 32
BY_ROWS = ("strided", "rows", "gaussian")
ROUNDED = ("int8", "int4")
DRAWS = 60
POINTS = 120
"""Of a line."""
DOTS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""The rates that are measured."""
LEAST, MOST = 0.01, 1.0
"""Shares of the bytes at the ends of the axis."""
QUIET, LOUD = 1e-5, 1e3
"""Noise at the ends of the axis."""


COLOURS = """\
.strided{{fill:none;stroke:{kept};stroke-width:2}} .rows{{fill:none;stroke:{gradients};stroke-width:2}}
.gaussian{{fill:none;stroke:{recomputed};stroke-width:2}} .even{{stroke:{budget};stroke-dasharray:7 4}}
.dot-strided{{fill:{kept}}} .dot-rows{{fill:{gradients}}} .dot-gaussian{{fill:{recomputed}}}
.dot-int4,.dot-int8{{fill:{inputs}}} .bits{{fill:{inputs};font-weight:600}}
"""


def draw() -> str:
    """The whole picture."""
    x, g = layer()
    own = moments(x, g).own
    parts = [*axes()]
    for name in BY_ROWS:
        parts += by_rows(name, x, g, own)
    for name in ROUNDED:
        kept, noise = share(KINDS[name], ROWS), measured(KINDS[name], x, g, ROWS) / own
        label = f'x="{at_x(kept) + 8:.0f}" y="{at_y(noise) + 4:.0f}"'
        parts += [dot(name, kept, noise), f'<text class="bits" {label}>{name}</text>']
    names = [(name, name) for name in BY_ROWS]
    parts += legend_lines(*names, ("even", "as noisy as the gradient of a batch is anyway"))
    return document(
        "sketch: noise of a weight gradient against what is kept; dots are measured", parts, RULES + COLOURS
    )


def by_rows(name: str, x: torch.Tensor, g: torch.Tensor, own: float) -> Iterable[str]:
    """The closed form of a kind as a line, and what was measured as dots."""
    kind = KINDS[name]
    law = kind.variance_law(x, g)
    counts = sorted({round(ROWS * LEAST ** (i / POINTS)) for i in range(1, POINTS)})
    points = [(share(kind, k), law(k) / own) for k in counts if share(kind, k) >= LEAST]
    yield f'<path class="{name}" d="M{line(points)}"/>'
    for k in (round(ROWS * rate) for rate in DOTS):
        yield dot(name, share(kind, k), measured(kind, x, g, k) / own)


def layer() -> tuple[torch.Tensor, torch.Tensor]:
    """An input and an output gradient: a few rows are far larger than others in both, as tokens often are."""
    generator = torch.Generator().manual_seed(0)
    x, g = (
        torch.randn(ROWS, width, dtype=torch.float64, generator=generator) for width in (FEATURES, OUTPUTS)
    )
    sizes = torch.randn(ROWS, 1, dtype=torch.float64, generator=generator).mul(0.6).exp()
    return x * sizes, g * sizes


def share(kind: Kind, k: int) -> float:
    """What is kept as a share of the input in single precision."""
    return kind.kept_bytes(ROWS, FEATURES, k, torch.float32) / (ROWS * FEATURES * 4)


def measured(kind: Kind, x: torch.Tensor, g: torch.Tensor, k: int) -> float:
    """The mean squared distance of gradients from sketches that were made."""
    generator = torch.Generator().manual_seed(k)
    exact, total = g.t() @ x, 0.0
    for _ in range(DRAWS):
        seed = torch.randint(2**31 - 1, (2, 4), generator=generator)
        found = kind.weight_gradient(g, kind.compress(x, seed, k), seed, k)
        total += float((found - exact).square().sum())
    return total / DRAWS


def at_x(kept: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT - 40) * math.log(kept / LEAST) / math.log(MOST / LEAST)


def at_y(noise: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(noise / QUIET) / math.log(LOUD / QUIET)


def line(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{at_x(kept):.1f},{at_y(noise):.1f}" for kept, noise in points)


def dot(name: str, kept: float, noise: float) -> str:
    place = f'x="{at_x(kept) - 4:.0f}" y="{at_y(noise) - 4:.0f}"'
    return f'<rect class="dot-{name}" {place} width="8" height="8" rx="4"/>'


def axes() -> Iterable[str]:
    for power in range(round(math.log10(QUIET)), round(math.log10(LOUD)) + 1, 1):
        y = at_y(10.0**power)
        shade = "even" if power == 0 else "grid"
        yield f'<path class="{shade}" d="M{LEFT},{y:.0f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{10.0**power:g}</text>'
    for kept in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        yield f'<text x="{at_x(kept):.0f}" y="{HEIGHT - 16}" text-anchor="middle">{kept:.0%}</text>'
    end = f'x="{WIDTH - RIGHT}" y="{HEIGHT + 5}" text-anchor="end"'
    yield f"<text {end}>kept, of the bytes of the input</text>"
