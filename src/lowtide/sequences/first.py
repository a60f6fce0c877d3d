"""The first run of a scan: what the cell closes over, whether it is random, and what a unit takes in bytes.

It is unit 0's own first run, so no step runs more often for it. Where sizes are asked for and not known yet,
its backward runs as well, with zeros, and what it saved is used up: should the plan keep unit 0 recorded from
the start, it runs once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Several
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .._torch import private_of, storage_key
from ..solve.sequence.actions import Action
from .chunk import Chunk
from .closed import Closed, graph_number
from .graph_loop import GraphLoop
from .loop import First, Loop
from .outputs import Outputs
from .purity import Purity
from .reachable import modes_of, reachable
from .record import Record
from .sequence import Piece, Sequence, differentiable, kind_of
from .sizes import Known, Sizes, Weighing
from .surroundings import RandomState, Surroundings, devices_of

__all__ = ["FirstRun", "run_first"]

_known: WeakKeyDictionary[Any, dict[Hashable, Known]] = WeakKeyDictionary()


@dataclass
class FirstRun:
    """What was learnt."""

    first: First
    closed: Closed
    surroundings: Surroundings
    start: RandomState
    random: bool
    trains: bool
    known: Known

    @property
    def sizes(self) -> Sizes | None:
        """The bytes of a unit, where they were weighed."""
        return self.known.sizes

    def loop(
        self,
        sequence: Sequence,
        actions: Iterable[Action],
        *,
        xs: Several[torch.Tensor],
        outputs: Outputs,
    ) -> Loop:
        """The scan that goes on from here."""
        return Loop(sequence, actions, xs=xs, outputs=outputs, first=self.first, **self.facts())

    def graph_loop(
        self, chunk: Chunk, actions: Iterable[Action], *, xs: Several[torch.Tensor], outputs: Outputs
    ) -> GraphLoop:
        """The scan from its start, in graphs."""
        return GraphLoop(
            chunk.sequence.in_records(),
            actions,
            xs=xs,
            outputs=outputs,
            first=None,
            chunk=chunk,
            **self.facts(),
        )

    def facts(self) -> dict[str, Any]:
        """What a loop is told."""
        return {
            "closed": self.closed,
            "surroundings": self.surroundings,
            "start": self.start,
            "random": self.random,
            "known": self.known,
        }


def run_first(
    sequence: Sequence,
    carry: list[Any],
    xs: Several[torch.Tensor],
    *,
    owner: Any,
    parameters: Iterable[torch.Tensor] = (),
    random: bool = False,
    weigh: bool = False,
) -> FirstRun:
    """Run unit 0. `owner` is the user's cell: what it closes over is looked for, and sizes are remembered."""
    named = list(reachable(owner))
    closed = Closed([*(tensor for _, tensor in named), *parameters], Purity(named, [*carry, *xs]))
    around = Surroundings(devices_of([*carry, *xs, *closed.tensors]))
    start = around.look()
    # Remembered by cell and shapes: weighing costs a backward of the first unit in every training step
    # otherwise.
    known = _known_of(owner).setdefault(_signature(sequence, carry, xs, around, owner, named), Known())
    weighing = Weighing(torch.device(around.devices[-1])) if weigh and known.sizes is None else None
    number = graph_number()
    finding = closed.standing_in() if _is_compiled(owner) else closed.finding([*carry, *xs])
    with weighing.counting() if weighing else nullcontext(), finding:
        record = Record(sequence, 0, carry, xs, [leaf.requires_grad for leaf in xs])
    moved = _moved(record) if weighing else 0
    record.keep()
    closed.purity.first_is_over(record.next_carry)
    closed.note(record.ends, number, [*record.carry, *record.inputs])
    needs = [
        *closed.tensors,
        *(leaf for leaf in (*carry, *xs) if differentiable(leaf) and leaf.requires_grad),
    ]
    run = FirstRun(
        First(record, record.next_carry, record.take_outputs(), record.flows),
        closed,
        around,
        start,
        random=random or around.differs(start),
        trains=bool(needs) and torch.is_grad_enabled(),
        known=known,
    )
    if weighing is not None and run.trains:
        known.sizes = _weigh(weighing, record, run, moved)
    return run


def _weigh(weighing: Weighing, record: Record, run: FirstRun, moved: int) -> Sizes:
    """The bytes of a unit; uses up its record, and puts copies in the place of its outputs."""
    weighing.ran()
    pieces = [Piece(place, [_copy(leaf) for leaf in leaves]) for place, leaves in run.first.pieces]
    run.first = First(None, record.next_carry, pieces, record.flows)
    weighing.recorded()
    counts = run.random and weighing.device.type == "cpu"  # random states are kept on the host
    random = run.surroundings.random_size if counts else 0
    state = moved + weighing.bytes_of(record.next_carry, [*record.carry, *record.inputs])
    gradients = [
        _zeros(leaf) if on else None for leaf, on in zip(record.next_carry, record.flows.carry, strict=True)
    ]
    gradient = sum(weighing.tracker.size(leaf) for leaf in gradients if leaf is not None)
    outputs = [[_zeros(leaf) if differentiable(leaf) else None for leaf in leaves] for _, leaves in pieces]
    with weighing.counting(), run.closed.without_hooks():
        record.backward(gradients, outputs, [run.closed.stand_ins[place] for place in run.closed.places])
    weighing.went_back(gradient)
    return Sizes(state + random, weighing.record, weighing.run, weighing.backward, gradient, random)


def _moved(record: Record) -> int:
    """The bytes of leaves that the unit takes from one place of its carry to another.

    Here they are the start's, which is there anyway; later on an earlier unit has made them. A leaf that
    stays where it is, or is a view of what was there, remains the start's.
    """
    after = record.ends[: len(record.carry)]
    shares = Counter(storage_key(leaf) for leaf in record.carry if isinstance(leaf, torch.Tensor))

    def stays(old: torch.Tensor, new: torch.Tensor) -> bool:
        return new is old or (storage_key(new) == storage_key(old) and shares[storage_key(old)] == 1)

    found = {
        id(new): new.numel() * new.itemsize
        for old, new in zip(record.carry, after, strict=True)
        if isinstance(new, torch.Tensor) and storage_key(new) in shares and not stays(old, new)
    }
    return sum(found.values())


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _zeros(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf)


def _is_compiled(owner: Any) -> bool:
    """Whether torch.compile made a cell: it would be compiled once more to be looked at."""
    return private_of(owner, "compiled_from", None) is not None


def _known_of(owner: Any) -> dict[Hashable, Known]:
    """What is known of a cell; that of a bound method belongs to its object."""
    owner = getattr(owner, "__self__", owner)
    try:
        return _known.setdefault(owner, {})
    except TypeError:  # no weak references to it
        return {}


def _signature(
    sequence: Sequence,
    carry: list[Any],
    xs: Several[torch.Tensor],
    around: Surroundings,
    owner: Any,
    named: Iterable[tuple[str, torch.Tensor]],
) -> Hashable:
    code = getattr(owner, "__func__", None)
    reached = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for _, tensor in named)
    leaves = [
        *carry,
        *(leaf.detach()[cut.place] for cut in sequence.cuts(0)[: len(xs)] for leaf in [xs[cut.leaf]]),
    ]
    shapes = tuple(kind_of(leaf) for leaf in leaves)
    wanted = tuple(leaf.requires_grad for leaf in xs)
    return sequence.signature, code, shapes, wanted, around.signature, reached, modes_of(owner)
