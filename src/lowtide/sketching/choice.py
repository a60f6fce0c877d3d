"""What is kept of one layer's input: the kind of sketch, and the share of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..arguments import flag
from ..errors import LowtideError
from .draw import SEED_BYTES
from .kind import Kind
from .kinds import KINDS, find_kind

__all__ = ["Choice", "fixed"]

_DEFAULT_RATE = 0.2


@dataclass(frozen=True)
class Choice:
    """A kind by its name, and the rate: kept rows for each row. Kinds without a rate keep all rows.

    With `always`, a planner is not asked whether a sketch is needed.
    """

    kind: str
    rate: float
    always: bool = False

    @classmethod
    def make(cls, kind: str, rate: float | None, *, always: bool = False) -> Choice:
        """What a user wrote; refuses what cannot be."""
        flag("always", always)
        if not find_kind(kind).has_rate:
            if rate is not None:
                raise LowtideError(f"kind={kind!r} keeps every row, in fewer bits, and takes no rate")
            return cls(kind, 1.0, always)
        if rate is None:
            return cls(kind, _DEFAULT_RATE, always)
        is_share = isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= 1
        if not is_share:
            raise LowtideError(
                f"rate={rate!r} must be above 0: the share of the rows to keep, 1 at most, as in 0.2"
            )
        return cls(kind, float(rate), always)

    @property
    def made(self) -> Kind:
        """The kind itself."""
        return KINDS[self.kind]

    def rows(self, rows: int) -> int:
        """How many of n rows are kept, at least one."""
        if not self.made.has_rate or self.rate >= 1:
            return rows
        return max(1, fixed(int(self.rate * rows + 0.5)))

    def bytes(self, rows: int, features: int, dtype: torch.dtype) -> int:
        """The bytes that are kept of an input, the seed included, a mask of rows not."""
        if self.is_exact(rows, features, dtype):
            return rows * features * dtype.itemsize
        return self.sketch_bytes(rows, features, dtype)

    def is_exact(self, rows: int, features: int, dtype: torch.dtype) -> bool:
        """Whether the input is kept as it is: all its rows would be, or a sketch would not be smaller."""
        if self.made.has_rate and self.rows(rows) >= rows:
            return True
        return self.sketch_bytes(rows, features, dtype) >= rows * features * dtype.itemsize

    def sketch_bytes(self, rows: int, features: int, dtype: torch.dtype) -> int:
        seed = SEED_BYTES if self.made.redraws else 0
        return self.made.kept_bytes(rows, features, self.rows(rows), dtype) + seed


def fixed(number: int) -> int:
    """A number as it is, also where torch.compile would have a symbol: sketches are compiled for one size."""
    return len(range(number))
