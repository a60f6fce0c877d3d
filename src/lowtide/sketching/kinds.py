"""The kinds of sketches by name."""

from __future__ import annotations

from ..errors import LowtideError
from .dense import Cosine, Gaussian, Hadamard, Rademacher
from .kind import Kind
from .rounded import Rounded
from .rows import Rows, RowsByNorm
from .strided import Strided

__all__ = ["KINDS", "find_kind"]

KINDS: dict[str, Kind] = {
    "strided": Strided(),
    "rows": Rows(),
    "rows_by_norm": RowsByNorm(),
    "gaussian": Gaussian(),
    "rademacher": Rademacher(),
    "dct": Cosine(),
    "srht": Hadamard(),
    "int8": Rounded(8),
    "int4": Rounded(4),
}


def find_kind(name: str) -> Kind:
    """The kind of that name; an unknown one is refused with those there are."""
    if not isinstance(name, str) or name not in KINDS:
        raise LowtideError(f"kind={name!r} is not known; choose one of {', '.join(KINDS)}")
    return KINDS[name]
