"""The executor of scans: takes the actions of a plan, forward until the first backward, and then the rest.

What is kept is what the actions say: carries (references, with the random state that the next unit starts
from) and recorded units. Units run in grad mode also where their graph is thrown away at once, so that a unit
takes the same kernels whenever it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch

from ..errors import LowtideError
from ..solve.sequence import Backward, Forward, Load, Pop, Push
from ..solve.sequence.actions import Action
from .closed import Closed, graph_number
from .ledger import is_recomputed_from, records_last
from .outputs import Outputs
from .record import Flows, Gradients, Record
from .sequence import Piece, Sequence, detached
from .sizes import Known
from .surroundings import RandomState, Surroundings

__all__ = ["First", "Kept", "Loop"]


FEW = 64
"""A cell that closes over more tensors is looked at in every unit, to know which of them to differentiate."""


class First(NamedTuple):
    """What the first run of unit 0 left: its record, unless that was used up, its carry and its outputs."""

    record: Record | None
    carry: list[Any]
    pieces: list[Piece]
    flows: Flows


class Kept(NamedTuple):
    """A carry, and the random state that the next unit starts from, where there are random numbers."""

    carry: list[Any]
    random: RandomState | None


class Loop:
    """One scan on its way forward and back."""

    def __init__(
        self,
        sequence: Sequence,
        actions: Iterable[Action],
        *,
        xs: Several[torch.Tensor],
        closed: Closed,
        outputs: Outputs,
        surroundings: Surroundings,
        start: RandomState,
        random: bool,
        first: First | None,
        known: Known | None = None,
    ) -> None:
        self.sequence, self.outputs, self.closed = sequence, outputs, closed
        self.xs = [leaf.detach() for leaf in xs]
        self.wanted = [leaf.requires_grad for leaf in xs]
        self.surroundings, self.random, self.start = surroundings, random, start
        self.look_ahead(actions)
        self.first = first
        self.kept: dict[int, Kept] = {}
        self.records: dict[int, tuple[Record, RandomState | None]] = {}
        self.workspace: Record | None = None
        self.carry: list[Any] = []
        self.reached = 0
        self.flows = Flows([], [])
        self.known = known
        self.graph_sizes: set[int] = set()
        seen = known is not None and known.looked_at >= sequence.units
        # Once every unit of this cell was looked at, later scans of it need only spot checks.
        self.trusted = closed.all_wanted = seen and len(closed.tensors) <= FEW

    def forward(self, init: list[Any]) -> tuple[list[Any], list[Any]]:
        """Run all units once; returns the last carry and what came of the outputs.

        Neither is held here: they will lead to the function that holds this loop.
        """
        self.carry = init
        self.kept[0] = Kept(init, self.surroundings.keep(self.start) if self.random else None)
        self.run_all()
        self.closed.purity.check()
        if not self.random and self.surroundings.differs(self.start):
            raise LowtideError(
                "the cell draws random numbers, but drew none in its first step, so the random state was not "
                "kept; write random=True"
            )
        self.start = []
        # Held here they would make a cycle: result -> autograd function -> loop -> result.
        carry, self.carry = [detached(leaf) for leaf in self.carry], []
        values, self.outputs.values = self.outputs.finish(), []
        return carry, values

    def run_all(self) -> None:
        """Take the actions before the first backward."""
        while not isinstance(self.ahead.following, Backward | None):
            self.perform(next(self.ahead))

    def look_ahead(self, actions: Iterable[Action]) -> None:
        """Take these actions from now on."""
        self.ahead = _Ahead(actions)

    def backward(self, carry: Gradients, totals: Gradients) -> tuple[Gradients, Gradients, Gradients]:
        """The gradients of init, of xs and of the closed-over tensors; takes those of the last carry over."""
        self.closed.purity.check_later()
        self.carry = []
        self.carry_gradients, self.totals = [*carry], self.outputs.shared(totals)
        carry.clear()
        self.xs_totals = [_Total(leaf, needed=on) for leaf, on in zip(self.xs, self.wanted, strict=True)]
        read = {*self.closed.places}
        self.closed_totals = [
            _Total(leaf, needed=place in read) for place, leaf in enumerate(self.closed.tensors)
        ]
        with self.surroundings.recomputing(), self.closed.without_hooks():
            for action in self.ahead:
                self.perform(action)
        self.kept.clear()
        self.note_looked_at()
        sums = [*self.xs_totals, *self.closed_totals]
        found = [total.tensor if total.found else None for total in sums]
        return self.carry_gradients, found[: len(self.xs)], found[len(self.xs) :]

    def note_looked_at(self) -> None:
        """Remember how many units were looked at (`check`)."""
        if self.known is not None:
            self.known.looked_at = max(self.known.looked_at, self.reached)

    def perform(self, action: Action) -> None:
        match action:
            case Forward(start, stop):
                keeps = records_last(action, self.ahead.following)
                for unit in range(start, stop):
                    self.run(unit, keep=keeps and unit == stop - 1)
            case Backward(unit):
                self.go_back(unit)
            case Push(at, "hidden"):
                self.kept[at] = Kept(self.carry_to_keep(), self.random_state())
            case Push(at, _):
                assert self.workspace is not None
                again = is_recomputed_from(self.ahead.following)
                self.records[at] = self.workspace, self.random_state() if again else None
                self.workspace = None
            case Pop(at, "hidden"):
                del self.kept[at]
            case Load(state):
                self.load(state)

    def run(self, unit: int, *, keep: bool) -> None:
        self.workspace = None
        first, self.first = self.first, None
        # The first unit ran already, to be measured: its results stand unless its record is wanted and used
        # up.
        if first is not None and (first.record is not None or not keep):
            record, carry, pieces, flows = first
        else:
            if first is not None and self.random:
                self.surroundings.go_on_from(self.start)
            record = self.recorded(unit, keep=keep)
            carry, pieces, flows = record.next_carry, record.take_outputs(), record.flows
        # Outputs are written once; a recomputed unit would only write the same.
        if unit >= self.reached:
            self.reached = unit + 1
            self.flows = self.flows.then(flows)
            for piece in pieces:
                self.outputs.write(piece)
        self.carry = carry
        self.workspace = record if keep else None

    def recorded(self, unit: int, *, keep: bool) -> Record:
        start = graph_number() if keep else 0
        # The second unit, run for the first time: only here can a cell read what its first step left in
        # Python.
        with self.closed.minding() if unit == self.reached == 1 else self.closed.standing_in():
            record = Record(self.sequence, unit, self.carry, self.xs, self.wanted)
        if keep:
            record.keep()
            self.check(unit, record, start)
        return record

    def check(self, unit: int, record: Record, start: int) -> None:
        """Refuse a unit that reads what is not known.

        All units are looked at when a cell is scanned for the first time; later on, those whose graph has
        another size than any before, and some of the others.
        """
        if self.trusted:
            size = graph_number() - start
            # Units 0, 1, 2, 4, 8, ... are looked at in any case: log2(n) looks in a scan of n units.
            if size in self.graph_sizes and unit & (unit - 1):
                return
            self.graph_sizes.add(size)
        inside = [*record.carry, *record.inputs]
        for tensor in self.closed.check(record.ends, start, inside):
            raise LowtideError(
                f"in step {unit} the cell reads a parameter of shape {tuple(tensor.shape)} that it did not "
                "read in its first step, so its gradient would be lost; hand it over as parameters=[tensor]. "
                "(A tensor that the cell itself makes to require a gradient, as in "
                "h.detach().requires_grad_(), is not supported.)"
            )

    def go_back(self, unit: int) -> None:
        record = self.records.pop(unit)[0] if unit in self.records else self.workspace
        assert record is not None
        # Nothing but the record may hold its tensors, or the backward could not free them as it goes.
        self.workspace, self.carry = None, []
        totals = [self.outputs.gradients(self.totals, place) for place in record.places]
        given, self.carry_gradients = self.carry_gradients, []
        places = self.closed.places
        read = [self.closed.stand_ins[place] for place in places]
        self.carry_gradients, inputs, closed = record.backward(given, totals, read, self.surroundings.outside)
        if unit:
            self.carry_gradients = self.flows.gradients_to_hold(self.carry_gradients)
        for cut, gradient in zip(record.cuts, inputs, strict=True):
            self.xs_totals[cut.leaf].add(gradient, cut.place)
        for place, gradient in zip(places, closed, strict=True):
            self.closed_totals[place].add(gradient)

    def load(self, state: int) -> None:
        self.workspace = None
        if state in self.kept:
            self.carry, random = self.kept[state]
        else:
            record, random = self.records[state - 1]
            self.carry = record.next_carry
        if self.random:
            assert random is not None
            self.surroundings.go_on_from(random)

    def carry_to_keep(self) -> list[Any]:
        """The carry of now, to be kept."""
        return self.carry

    def random_state(self) -> RandomState | None:
        return self.surroundings.random() if self.random else None


class _Ahead(Iterator[Action]):
    """Actions one by one, with a look at the next one."""

    def __init__(self, actions: Iterable[Action]) -> None:
        self.actions = iter(actions)
        self.following = next(self.actions, None)

    def __next__(self) -> Action:
        action = self.following
        if action is None:
            raise StopIteration
        self.following = next(self.actions, None)
        return action


class _Total:
    """The sum of the gradients of a tensor; there from the start where some will come."""

    def __init__(self, of: torch.Tensor, *, needed: bool) -> None:
        self.of = of
        self.found = False
        self.tensor = torch.zeros_like(of) if needed else None

    def add(self, gradient: torch.Tensor | None, place: Any = None) -> None:
        if gradient is None:
            return
        if self.tensor is None:
            self.tensor = torch.zeros_like(self.of)
        self.found = True
        # In place and in the order of the units, from last to first, as autograd would add them.
        (self.tensor if place is None else self.tensor[place]).add_(gradient)
