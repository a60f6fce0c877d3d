"""What the links of an `nn.Sequential` take, and the law that follows for checkpoints.

A link is a layer, or several that no checkpoint can separate: a layer that works in place on its input, or
whose output is a view of it, belongs to the layer before it. `chain_measure` fills in its bytes.

The law, exact for `torch.utils.checkpoint(use_reentrant=False)`: a segment of links i+1 to j reaches its most

- while link k goes backward: what links i+1 to k saved, its own working set, the parameter gradients so far;
- while link l is recomputed, up to the last tensor that the segment saves, when the first saved tensor is
  asked for: what the links before it saved, what it makes, the gradient that came in;
- while it runs for the first time, and saves nothing.

The last segment is never recomputed: it keeps what it saves, and its backward comes first. A segment in which
nothing at all is saved lets go of its input, which the law does not know: it says too much there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

__all__ = ["ChainLaw", "Link"]


@dataclass(frozen=True)
class Link:
    """Layers `start` to `end` - 1 of a Sequential, and the bytes they take beside their input."""

    start: int
    end: int
    out: int
    """The output."""
    forward: int = 0
    """The most while it runs and saves nothing."""
    saving: int = 0
    """The most while it runs and saves for its backward."""
    until_saved: int = 0
    """The same, up to the moment when the last tensor is saved; 0 when none is."""
    extra: int = 0
    """What it saves beside its input, its output and parameters; recomputed, copies of buffers it changes."""
    first_extra: int = 0
    """The same when it was not recomputed."""
    saves_input: bool = False
    saves_output: bool = False
    waiting: int = 0
    """The gradients that are there when its backward first asks for a saved tensor."""
    backward: int = 0
    """The most while it goes backward from recomputed tensors, with all that it saved beside its input."""
    backward_free: int = 0
    """The same with its input, where nobody else holds that: it may go before the end."""
    first_backward: int = 0
    """As `backward`, where it was not recomputed: autograd holds saved tensors for a little longer.

    The last link's output is held by the caller and counts here.
    """
    first_backward_free: int = 0
    gradients: int = 0
    """The gradients of parameters that it leaves."""
    random: bool = False
    changes_buffers: bool = False

    @property
    def keeps_only_input(self) -> bool:
        """Whether recomputing it would give back nothing."""
        return not self.extra and not self.saves_output


@dataclass(frozen=True)
class ChainLaw:
    """The law of a chain of links; vertex 0 is the input, vertex k the output of link k-1 of the tuple."""

    links: tuple[Link, ...]
    first: int
    """The bytes of the input."""
    first_held: bool = True
    """Whether the caller holds the input anyway."""
    monotone: bool = False

    def __call__(self, i: int, j: int) -> int:
        return self.row(i)[j - i - 1]

    def sweep(self) -> Callable[[int, int], int]:
        return self

    @cached_property
    def sizes(self) -> list[int]:
        return [self.first, *(link.out for link in self.links)]

    def row(self, i: int) -> list[int]:
        """U(i, j) for each j after i; the output of the chain is held by the caller all the while."""
        found: list[int] = []
        first_time = running = back = cut = 0
        for index in range(i, len(self.links)):
            link = self.links[index]
            before = self.kept[index] - self.kept[i]
            loose = self.loose[index] if index > i else 0
            first_time = max(first_time, link.forward + (self.sizes[index] if index > i else 0))
            if link.until_saved:
                # torch.utils.checkpoint stops a recomputation at the last tensor that is asked for (early
                # stop).
                cut = max(running, before + loose + link.until_saved)
                cut += link.waiting + self.gradients[index] + self.sizes[-1]
            running = max(running, before + loose + link.saving)
            # The segment's own input is held by the checkpoint until its end.
            frees = index > i and self._frees_input(index)
            work = link.backward_free - self.sizes[index] if frees else link.backward
            back = max(back, before + work + self.gradients[index] + self.sizes[-1])
            found.append(max(first_time, cut, back))
        found[-1] = self._last(i)
        return found

    def _last(self, i: int) -> int:
        """The last segment: it is not recomputed, and its output is the one that the caller holds."""
        most = 0
        held = i == 0 and self.first_held
        dead = 0 if held or self.links[i].saves_input else self.sizes[i]
        for index in range(i, len(self.links)):
            link = self.links[index]
            before = self.first_kept[index] - self.first_kept[i] - (dead if index > i else 0)
            loose = self.loose[index] if index > i else 0
            frees = self._frees_input(index) if index > i else not held
            work = link.first_backward_free - self.sizes[index] if frees else link.first_backward
            work += self.gradients[index] + (self.sizes[-1] if index < len(self.links) - 1 else 0)
            most = max(most, before + loose + link.saving, before + work)
        return most

    def _frees_input(self, index: int) -> bool:
        """Whether the input of a link is saved by that link alone."""
        return self.links[index].saves_input and not self.links[index - 1].saves_output

    @cached_property
    def loose(self) -> list[int]:
        """The bytes of each output that nobody saves."""
        ahead = [*self.links[1:], None]
        saved = [a.saves_output or bool(b and b.saves_input) for a, b in zip(self.links, ahead, strict=True)]
        return [0, *(0 if kept else link.out for link, kept in zip(self.links, saved, strict=True))]

    @cached_property
    def kept(self) -> list[int]:
        """What the links up to each save, outputs included."""
        each = (a.extra + a.out - loose for a, loose in zip(self.links, self.loose[1:], strict=True))
        return list(accumulate(each, initial=0))

    @cached_property
    def first_kept(self) -> list[int]:
        """The same for links that are not recomputed."""
        each = (a.first_extra + a.out - loose for a, loose in zip(self.links, self.loose[1:], strict=True))
        return list(accumulate(each, initial=0))

    @cached_property
    def gradients(self) -> list[int]:
        """The parameter gradients that are there when each link starts its backward."""
        left = [*accumulate((link.gradients for link in reversed(self.links)), initial=0)]
        return left[-2::-1]
