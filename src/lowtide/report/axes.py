"""Round numbers along the axes of the report's pictures."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["byte_ticks", "share_ticks", "step_ticks"]


def byte_ticks(top: int) -> list[tuple[int, str]]:
    """Four to eight round numbers of one binary unit, from zero."""
    power = min(max(top.bit_length() - 1, 0) // 10, 4)
    unit, size = ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power
    gap = next((gap for gap in _round_numbers() if top / size / gap <= 8), 1e9)
    ticks = (index * gap for index in range(9) if index * gap * size <= top)
    return [(int(tick * size), f"{tick:g} {unit}") for tick in ticks]


def step_ticks(steps: int) -> list[int]:
    """At most ten round numbers of steps, from zero."""
    gap = next(int(gap) for gap in _round_numbers() if gap >= 1 and steps / gap <= 10)
    return list(range(0, steps, gap))


def share_ticks(top: float) -> list[float]:
    """At most six round shares, from zero."""
    gap = next((gap for gap in _round_numbers() if top / gap <= 6), 1e12)
    return [index * gap for index in range(8) if index * gap <= top]


def _round_numbers() -> Iterable[float]:
    return (digit * 10.0**power for power in range(-4, 13) for digit in (1, 2, 5))
