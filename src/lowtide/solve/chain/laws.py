"""What reversing one segment of a chain takes: the laws behind `chain`.

Vertices 0 to n-1 have output sizes d_k; vertex 0 is the input. A segment (i, j) starts from the kept output
of i, recomputes i+1 to j and goes backward from j to i. A law U(i, j) says how many bytes that takes at most
beside the kept outputs 0 to i. Three are known here:

- `"paper"`, Hong et al. (2025): the interior that is recomputed, the largest gradient that is formed, and the
  gradient that comes in at j:  sum_{i<k<j} d_k + max_{i<=k<j} d_k + d_j;
- `"pytorch"`: what `torch.utils.checkpoint(use_reentrant=False)` does to the byte, for layers that save their
  input and nothing else:  max_{i<k<=j} ( sum_{i<l<k} d_l + d_k + d_{k-1} );
- `Measured(extra, work)`: layer l keeps d_l + extra_l, and the backward of k needs work_k:
  max_{i<k<=j} ( sum_{i<l<k} (d_l + extra_l) + work_k ).

All three are U(i, j) = rise_j - base_i + max_{i<k<=j} top_k with rise and base that never fall, so U never
falls when a segment grows at either end. That is what the linear algorithm needs ("monotone"). Any function
(i, j) -> bytes is a law too, for the quadratic algorithm; one that also counts recomputing the output of j
is not monotone, because a longer segment may end in a smaller output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from random import Random
from typing import Literal, Protocol, TypeAlias

import numpy as np

from ...errors import LowtideError

__all__ = ["Law", "Measured", "Model", "find_law", "refuse_unless_monotone"]

WAY_OUT = "use method='quadratic', which takes any law"

CHECKED_WHOLE = 64
"""Chains up to this long have a user's law checked for every pair, longer ones for some pairs."""


class Law(Protocol):
    """The bytes of reversing a segment."""

    @property
    def monotone(self) -> bool:
        """Whether it never falls when a segment grows."""

    def __call__(self, i: int, j: int, /) -> int:
        """U(i, j)."""

    def row(self, i: int) -> Sequence[int]:
        """U(i, i+1), U(i, i+2), ..., U(i, n-1)."""

    def sweep(self) -> Callable[[int, int], int]:
        """U for calls whose i and j never rise, in O(1) each when all are counted together."""


@dataclass(frozen=True)
class Measured:
    """Sizes measured layer by layer, for vertices 1 to n-1.

    `extra[k-1]` is what layer k keeps for its backward beside its output's size, which counts as kept (less
    than 0 where nobody saves the output); `work[k-1]` is all that its backward takes beside what the layers
    before it in the segment keep: its own saved tensors, both gradients, temporaries.
    """

    extra: tuple[int, ...]
    work: tuple[int, ...]


Model: TypeAlias = Literal["paper", "pytorch"] | Measured | Law | Callable[[int, int], int]


@dataclass(frozen=True)
class Window:
    """U(i, j) = rise_j - base_i + max_{i<k<=j} top_k."""

    rise: Sequence[int]
    base: Sequence[int]
    top: Sequence[int]
    monotone: bool = True

    def __call__(self, i: int, j: int) -> int:
        return self.rise[j] - self.base[i] + max(self.top[i + 1 : j + 1])

    def row(self, i: int) -> list[int]:
        tops = np.maximum.accumulate(np.array(self.top[i + 1 :], dtype=np.int64))
        found: list[int] = (tops + np.array(self.rise[i + 1 :], dtype=np.int64) - self.base[i]).tolist()
        return found

    def sweep(self) -> Callable[[int, int], int]:
        rise, base, top = self.rise, self.base, self.top
        places: deque[int] = deque()  # tops grow from front to back; the back is the window's largest
        start = len(top)

        def upper(i: int, j: int) -> int:
            nonlocal start
            while start > i + 1:
                start -= 1
                while places and top[places[0]] <= top[start]:
                    places.popleft()
                places.appendleft(start)
            while places[-1] > j:
                places.pop()
            return rise[j] - base[i] + top[places[-1]]

        return upper


@dataclass(frozen=True)
class FunctionLaw:
    """A user's function of (i, j) as a law; `monotone` is what the function says of itself."""

    function: Callable[[int, int], int]
    count: int

    @property
    def monotone(self) -> bool:
        return bool(getattr(self.function, "monotone", False))

    def __call__(self, i: int, j: int) -> int:
        return self.function(i, j)

    def row(self, i: int) -> list[int]:
        return [self.function(i, j) for j in range(i + 1, self.count)]

    def sweep(self) -> Callable[[int, int], int]:
        return self.function


def find_law(sizes: Sequence[int], model: Model) -> Law:
    """The law of a model for a chain of these sizes."""
    if isinstance(model, str):
        return _named(sizes, model)
    if isinstance(model, Measured):
        return _measured(sizes, model)
    if callable(model):
        return model if hasattr(model, "row") else FunctionLaw(model, len(sizes))  # type: ignore[return-value]
    raise LowtideError(
        f"model {model!r} is no law; choose 'paper', 'pytorch', Measured(extra=..., work=...) "
        "or a function (i, j) -> bytes"
    )


def _named(sizes: Sequence[int], name: str) -> Window:
    sums = list(accumulate(sizes))
    before = [0, *sizes[:-1]]
    if name == "paper":
        return Window(rise=sums, base=sums, top=before)
    if name == "pytorch":
        tops = [total + last for total, last in zip(sums, before, strict=True)]
        return Window(rise=[0] * len(sizes), base=sums, top=tops)
    raise LowtideError(f"model {name!r} is not known; choose 'paper', 'pytorch', Measured or a function")


def _measured(sizes: Sequence[int], model: Measured) -> Window:
    layers = len(sizes) - 1
    if len(model.extra) != layers or len(model.work) != layers:
        raise LowtideError(
            f"Measured has {len(model.extra)} extra and {len(model.work)} work sizes; "
            f"a chain of {len(sizes)} outputs has {layers} layers"
        )
    for layer, (size, extra) in enumerate(zip(sizes[1:], model.extra, strict=True), 1):
        if size + extra < 0:
            raise LowtideError(
                f"Measured.extra[{layer - 1}] is {extra}: layer {layer} keeps less than nothing of {size}"
            )
    kept = list(accumulate([0, *(d + e for d, e in zip(sizes[1:], model.extra, strict=True))]))
    tops = [0, *(before + work for before, work in zip(kept, model.work, strict=False))]
    return Window(rise=[0] * len(sizes), base=kept, top=tops)


def refuse_unless_monotone(law: Law, count: int) -> None:
    """Raise where a law falls when a segment grows, as far as that can be seen in O(n) calls."""
    if isinstance(law, Window):
        return
    if count > CHECKED_WHOLE and not law.monotone:
        raise LowtideError(
            f"method 'linear' needs a law that never falls when a segment grows; with {count} outputs that "
            f"cannot be checked for every pair: set `monotone = True` on the law if it is, or {WAY_OUT}"
        )
    for i, j in _pairs(count):
        for a, b in ((i, j + 1), (i - 1, j)):
            if a >= 0 and b < count and law(a, b) < law(i, j):
                raise _falls(law, (i, j), (a, b))


def refuse_if_above(limit: int, sizes: Sequence[int], indices: Sequence[int], law: Law) -> None:
    """Raise where the kept outputs have a peak above the limit that the linear algorithm kept to.

    Under a monotone law they never have: a nearer checkpoint needs no more than the one it was chosen for. A
    law that only says that it is monotone shows here what it is, where that matters.
    """
    held = 0
    for i, j in pairwise(indices):
        held += sizes[i]
        if held + law(i, j) > limit:
            longer = [*((i, b) for b in range(j + 1, len(sizes))), *((a, j) for a in range(i))]
            raise _falls(law, (i, j), next((one for one in longer if law(*one) < law(i, j)), None))


def _falls(law: Law, short: tuple[int, int], long: tuple[int, int] | None) -> LowtideError:
    """The error of a law that falls when a segment grows: at which end, and from what to what."""
    where = ""
    if long is not None:
        end = "end" if short[0] == long[0] else "start"
        where = f" at its {end}: U{short} = {law(*short)} and U{long} = {law(*long)}"
    return LowtideError(
        "method 'linear' needs a law that never falls when a segment grows, but this one falls when it grows"
        f"{where}; {WAY_OUT}"
    )


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    """All pairs i < j of a short chain; neighbours and as many chosen ones of a long chain."""
    if count <= CHECKED_WHOLE:
        yield from ((i, j) for i in range(count) for j in range(i + 1, count))
        return
    yield from ((i, i + 1) for i in range(count - 1))
    draw = Random(0)
    for _ in range(count):
        i = draw.randrange(count - 1)
        yield i, draw.randrange(i + 1, count)
