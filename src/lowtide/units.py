"""Bytes and seconds, as people write and read them.

Integers are bytes. "8GiB" is 8 * 2^30, "8GB" is 8 * 10^9. "60%" is a share of what the step takes without a
budget, "90% of device" one of the device's memory. "free" is what the device has free; "min" is the smallest
peak that can be found, "knee" the one below which memory costs more than its share of time. `planner` makes
bytes of them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from .errors import BudgetError

__all__ = ["Budget", "format_bytes", "format_seconds", "parse_budget", "refuse_device_share"]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGTP", 1)}
_UNITS |= {f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("KMGTP", 1)}
_BY_LOWER = {unit.lower(): size for unit, size in _UNITS.items()}
_NUMBER = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]*)?|-?\.[0-9]+)\s*([A-Za-z%]*)\s*")

_BITS = re.compile("[KMGTP]i?b")
"""Units of bits, as a network's speed is written; "mb" in small letters alone is somebody's MB."""

_OF_DEVICE = re.compile(r"\s*of\s+(?:the\s+)?device\s*", re.IGNORECASE)

_MOST_BITS = 63
_EXAMPLES = 'write an integer of bytes, "8GiB", "512MB", "60%", "90% of device", "free", "min" or "knee"'


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget as it was asked for: an amount of bytes, a share of a whole, or a word.

    A share is `of` the peak of the step without a budget, or of the memory of its device; one of the peak
    comes to `at_least` so many bytes.
    """

    text: str
    bytes: int | None = None
    share: float | None = None
    word: str | None = None
    of: Literal["peak", "device"] = "peak"
    at_least: int = 0

    def __str__(self) -> str:
        return f"{self.text}, at least {self.at_least} bytes" if self.at_least else self.text

    @property
    def is_share_of_peak(self) -> bool:
        """Whether it is a share of what the step takes without a budget."""
        return self.share is not None and self.of == "peak"

    @property
    def is_knee(self) -> bool:
        """Whether it is looked for among the step's own plans."""
        return self.word == "knee"

    @property
    def is_relative(self) -> bool:
        """Whether it is relative to what the step itself takes, so that no other bytes count against it."""
        return self.is_share_of_peak or self.is_knee

    @property
    def is_share_of_device(self) -> bool:
        """Whether it is a share of the device's memory."""
        return self.share is not None and self.of == "device"

    def part(self, whole: int) -> int:
        """The bytes of the share of a whole: 57% of 100 is 57, though the nearest float to 0.57 is less."""
        return int(Fraction(repr(self.share or 0.0)) * whole)


def parse_budget(budget: int | str | Budget) -> Budget:
    """The budget that was asked for; raises `BudgetError` for what cannot be one.

    >>> parse_budget("8GiB").bytes
    8589934592
    >>> parse_budget("60%").share
    0.6
    >>> parse_budget("90% of device").of
    'device'
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, float) and 0 < budget < 1:
        raise BudgetError(_of_a_fraction(budget, budget))
    if isinstance(budget, bool) or not isinstance(budget, int | str):
        raise BudgetError(f"budget {budget!r} is a {type(budget).__name__}; {_EXAMPLES}")
    if isinstance(budget, int) and budget.bit_length() > _MOST_BITS:
        raise BudgetError(f"budget of {budget.bit_length()} bits is no number of bytes; {_EXAMPLES}")
    parsed = _parse_text(budget) if isinstance(budget, str) else Budget(format_bytes(budget), budget)
    amount = parsed.bytes if parsed.share is None else parsed.share
    if amount is not None and amount <= 0:
        raise BudgetError(f"budget {budget!r} is not above zero; {_EXAMPLES}")
    return parsed


def _parse_text(text: str) -> Budget:
    word = text.strip().lower()
    if word in ("free", "min", "knee"):
        return Budget(text, word=word)
    start, percent, rest = text.partition("%")
    of_device = _OF_DEVICE.fullmatch(rest) is not None
    match = _NUMBER.fullmatch(start + percent if of_device else text)
    if match is None:
        raise BudgetError(f"budget {text!r} cannot be read; {_EXAMPLES}")
    number, unit = Fraction(Decimal(match[1])), match[2]
    if not math.isfinite(float(match[1]) * 2**50):
        raise BudgetError(f"budget {text!r} is not a finite number of bytes; {_EXAMPLES}")
    if unit == "%":
        return Budget(text, share=float(number / 100), of="device" if of_device else "peak")
    if _BITS.fullmatch(unit):
        raise BudgetError(f"budget {text!r} reads as bits; for bytes write {match[1]}{unit[:-1]}B")
    if unit.lower() not in _BY_LOWER:
        raise BudgetError(f"budget {text!r} has the unknown unit {unit!r}; {_EXAMPLES}")
    if not unit and 0 < number < 1:
        raise BudgetError(_of_a_fraction(text, float(number)))
    return Budget(text.strip(), int(number * _BY_LOWER[unit.lower()]))


def _of_a_fraction(asked: object, number: float) -> str:
    return f'budget {asked!r} is less than one byte; a share is written "{100 * number:g}%"'


def refuse_device_share(asked: Budget, what: str) -> Budget:
    """The budget of a part of a step; a share of the device says nothing there, where it is not alone."""
    if asked.is_share_of_device:
        raise BudgetError(
            f'budget {asked} is not known to {what}; write bytes, as in "2GiB", a share of what it takes '
            'without a budget, as in "60%", or "min"'
        )
    return asked


def format_bytes(size: float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above.

    >>> format_bytes(8589934592)
    '8.00 GiB'
    """
    size = float(size)
    sign = "-" if size < 0 else ""
    size = abs(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.2f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Seconds in a unit that keeps the number at 1 or above.

    >>> format_seconds(0.0125)
    '12.5 ms'
    """
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError("unreachable")
