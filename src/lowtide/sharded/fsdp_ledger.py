"""What FSDP2 takes on a device, event by event: parameters that are whole, buffers, gradients.

FSDP gathers the parameters of a group before its forward and before its backward, and frees them after both.
Each time there are, for a while, a buffer of the collective and the parameters themselves; which of them is
alive together with which of its neighbours is the order in `torch.distributed.fsdp` (`_fsdp_param_group.py`,
read in torch 2.13):

- forward: the buffer of a gather stays until the next group has been gathered, the last one until the root's
  forward ends;
- before a backward the buffer is freed at once, and the gather for the group before it is begun;
- after a backward parameters are freed, then gradients are copied into the buffer of the reduce-scatter,
  which stays until the next group's.

No torch; sizes are bytes as the device's allocator rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Group", "Ledger"]


@dataclass(frozen=True)
class Group:
    """The bytes of the parameters that FSDP gathers and reduces together.

    `sharded` is this rank's part, `whole` the gathered parameters, `gather` the buffer of their collective
    and `cast` the copy of the part in another precision that goes into it; `recopied` is what is copied once
    more since it is sharded along another dimension than the first. `gradients` are those of the whole
    parameters,
    `scatter` the buffer of the reduce-scatter, `reduced` what comes out of it where that is cast once more,
    `kept` what is left in `.grad`, and `summed` the gradients that wait while they are not synchronised;
    `recast` says that those are copies in another precision. `scratch` is what the reduce-scatter takes for
    itself: on the CPU a copy of its input.

    `frees` says that parameters are freed after the forward, `frees_after_backward` after the backward,
    `reduces` that gradients are synchronised, `has_gradients` and `has_sums` that there are gradients
    already: this rank's part of them, or those of the whole parameters.
    """

    name: str
    sharded: int = 0
    whole: int = 0
    gather: int = 0
    cast: int = 0
    recopied: int = 0
    gradients: int = 0
    scatter: int = 0
    reduced: int = 0
    kept: int = 0
    summed: int = 0
    scratch: int = 0
    recast: bool = False
    modules: int = 1
    frees: bool = True
    frees_after_backward: bool = True
    reduces: bool = True
    has_gradients: bool = False
    has_sums: bool = False
    ahead_in_forward: tuple[int, ...] = ()
    ahead_in_backward: tuple[int, ...] = ()


class Ledger:
    """Follows the groups of a model through a step; the last one is the root's.

    `note` is called with what FSDP holds whenever that may be a peak. `unsharded`, `buffers` and `gradients`
    are what it holds now, besides this rank's part of the parameters.
    """

    def __init__(
        self, groups: Sequence[Group], note: Callable[[int], None], *, buffers_kept: int = 1
    ) -> None:
        self.groups = groups
        self.root = len(groups) - 1
        self.say = note
        self.buffers_kept = buffers_kept
        self.whole: set[int] = set()
        self.pending: set[int] = set()
        self.retained = 0
        self.scattering: list[int] = []
        self.scratch = 0
        self.order: list[int] = []
        self.places: dict[int, list[int]] = {}
        self.gradients = 0
        self.passing = 0

    @property
    def unsharded(self) -> int:
        """Bytes of parameters that are whole."""
        return sum(self.groups[index].whole for index in self.whole)

    @property
    def buffers(self) -> int:
        """Bytes of the buffers of collectives."""
        waiting = sum(self.groups[index].gather for index in self.pending)
        return waiting + self.retained + sum(self.scattering) + self.scratch + self.passing

    @property
    def now(self) -> int:
        """All that FSDP holds."""
        return self.unsharded + self.buffers + self.gradients

    def note(self, passing: int = 0) -> None:
        """Bytes that are there, with some that pass."""
        self.passing = passing
        self.say(self.now)
        self.passing = 0

    def enter_forward(self, index: int) -> None:
        """A module of a group is about to run."""
        self.gather(index)
        if index in self.pending:
            self.retained = 0
            self.copy_out(index)
            self.retained = self.groups[index].gather
        for other in self.groups[index].ahead_in_forward:
            self.gather(other)
        self.note()

    def exit_forward(self, index: int) -> None:
        """A module of a group has run; parameters of several modules stay until the last backward."""
        group = self.groups[index]
        if group.frees and group.modules == 1:
            self.whole.discard(index)
        self.places.setdefault(index, []).append(len(self.order))
        self.order.append(index)
        if index == self.root:
            self.retained = 0
        self.note()

    def enter_backward(self, index: int) -> None:
        """The backward of a module is about to run."""
        self.gather(index)
        if index in self.pending:
            self.copy_out(index)
        ahead = self.groups[index].ahead_in_backward
        for other in ahead or self.before(index):
            self.gather(other)
        self.note()

    def before(self, index: int) -> Sequence[int]:
        """The group whose forward came before, which FSDP gathers ahead of its backward."""
        places = self.places.get(index)
        place = places[-1] if places else 0
        return self.order[place - 1 : place] if place else ()

    def exit_backward(self, index: int, *, gradients: int | None = None) -> None:
        """The backward of a module has run: its gradients, unless they are counted elsewhere, are there."""
        group = self.groups[index]
        made = group.gradients if gradients is None else gradients
        self.note(made)
        places = self.places.get(index, [])
        if places:
            places.pop()
        if group.modules > 1 and places:
            self.gradients += made
            return
        if group.frees_after_backward:
            self.whole.discard(index)
        if not group.reduces:
            self.keep_whole_gradients(group, made)
            return
        while len(self.scattering) >= self.buffers_kept:
            self.scattering.pop(0)
        self.note(made + group.scatter + group.recopied)
        self.scattering.append(group.scatter)
        self.note(group.scratch + group.reduced + group.kept)
        self.scratch = group.scratch  # a thread of its own frees it, sooner or later
        if not group.has_gradients:
            self.gradients += group.kept
        self.note()

    def keep_whole_gradients(self, group: Group, made: int) -> None:
        """Without synchronisation the gradients of the whole parameters stay."""
        self.note(made + group.summed if group.recast else made)
        if not group.has_sums:
            self.gradients += group.summed

    def gather(self, index: int) -> None:
        group = self.groups[index]
        if index not in self.whole and index not in self.pending:
            self.pending.add(index)
            self.note(group.cast)

    def copy_out(self, index: int) -> None:
        group = self.groups[index]
        self.whole.add(index)
        self.note(group.recopied)
        self.pending.discard(index)
