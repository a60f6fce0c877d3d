"""One call of a step that comes in pieces, looked at from its forward to the end of its backward.

What the simulator must know of the whole step and no graph of a piece tells: which storages go from one piece
to the next, which of them somebody else than the pieces holds, and what runs between the pieces. Storages are
known by their identity and only weakly held. They are looked for when a piece begins, in the forward and in
the backward; what is alive then and no piece needs any more, something else holds: the caller, a variable of
the model, an operator between the pieces that has saved it.

What is not captured makes storages of its own. They are counted by a dispatch mode, which is on while the
model's own code runs between the pieces, and around each of autograd's nodes that are not of a piece.

Limits: what an operator between the pieces takes and gives back inside is not seen, nor what libraries take
past torch's operators. A loss outside of the call is not looked at; bytes are set aside for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .._torch import private, storage_key, untraced, when_backward_ends
from ..pipeline.pieces import Piece, begin_backward, is_tensor, turn_under_way
from ..pipeline.runnable_step import RunnableStep, backward_node
from ..planner.joined_graph import Between, BrokenStep
from ..planner.joined_graph import Turn as SeenTurn
from ..plans.schedule import Run
from .between_pieces import Gaps, leaf_of, nodes_between, summed

__all__ = ["Passage"]

_leaves = private("tree_leaves")
_numbers = count(1)


@dataclass(frozen=True)
class _Store:
    """A storage that was met: which one it is, and a weak reference to it."""

    number: int
    ref: StorageWeakRef


@dataclass(eq=False)
class _Turn:
    """One run of a piece, and the storages that its functions were given and gave."""

    passage: Passage
    place: int
    part: RunnableStep
    step: RunnableStep
    piece: Piece
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    tangents: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    rereads: frozenset[int] = frozenset()
    absent: frozenset[int] | None = None

    def forward(self, given: Sequence[Any], results: Sequence[Any] | None) -> None:
        if results is None:
            self.inputs = self.passage.met(self.piece.primals, given, self.piece)
        else:
            self.outputs = self.passage.met(self.piece.outputs, results, self.piece)
            self.rereads = frozenset(self.needed())

    def backward(self, tangents: Sequence[Any], gradients: Sequence[Any] | None) -> None:
        if gradients is None:
            self.absent = frozenset(place for place, one in enumerate(tangents) if one is None)
            known = {store.number for store in self.passage.stores.values()}
            self.tangents = self.passage.met(self.piece.tangents, tangents, self.piece)
            self.passage.came(self.tangents, known, self)
        else:
            self.gradients = self.passage.met(self.piece.gradients, gradients, self.piece)
            self.passage.begin_gap()

    def needed(self) -> Iterator[int]:
        """What goes in or comes out and its backward reads: until then it holds that itself."""
        plan = self.step.plan
        assert plan is not None
        runs = (step.op for step in plan.schedule.backward if isinstance(step, Run))
        read = {name for op in runs for name in plan.graph.op[op].reads}
        return (
            number for names in (self.inputs, self.outputs) for name, number in names.items() if name in read
        )

    def seen(self) -> SeenTurn:
        assert self.piece.graph is not None
        pairs = zip(self.piece.gradients, self.piece.primals, strict=False)
        return SeenTurn(
            self.piece.graph,
            self.inputs,
            self.outputs,
            self.tangents,
            self.gradients,
            {gradient: primal for gradient, primal in pairs if gradient and primal},
            self.rereads,
        )


class Passage:
    """A call that is looked at, and then its backward."""

    def __init__(self, device: torch.device) -> None:
        self.stores: dict[int, _Store] = {}
        self.turns: list[_Turn] = []
        self.nodes: set[Any] = set()
        self.gaps = Gaps(device, self.made, self.read)
        self.new: dict[int, int] = {}
        self.given: dict[int, int] = {}
        self.after: set[int] = set()
        self.before: list[Between] = []
        self.before_backward: list[Between] = []
        self.waiting: set[int] = set()
        self.backward: list[int] = []
        self.returned: frozenset[int] = frozenset()
        self.losses: dict[int, int] = {}
        self.sums: dict[Any, list[int]] = {}
        self.added: dict[Any, int] = {}
        self.begun: set[int] = set()
        self.written: set[int] = set()
        self.outside = 0
        self.guesses = True
        self.under_way = 0
        self.ended = self.nested = False

    # Storages

    def met(self, names: Sequence[str | None], items: Sequence[Any], piece: Piece) -> dict[str, int]:
        """The storages of values; what the piece has made is new, also in the place of something else."""
        found: dict[str, int] = {}
        makes = names is piece.outputs or names is piece.gradients
        for name, item in zip(names, items, strict=False):
            if name is not None and is_tensor(item) and name not in found:
                found[name] = self.number(item, fresh=makes and name in piece.made)
        return found

    def number(self, tensor: torch.Tensor, *, fresh: bool = False) -> int:
        key = storage_key(tensor)
        if fresh or key not in self.stores:
            storage = tensor.untyped_storage()
            self.stores[key] = _Store(next(_numbers), StorageWeakRef(storage))
        return self.stores[key].number

    def made(self, tensor: torch.Tensor) -> None:
        """Called with what is made between pieces."""
        number = self.number(tensor, fresh=True)
        self.new[number] = self.gaps.size(tensor)

    def read(self, tensor: torch.Tensor) -> None:
        """Called with what is read between pieces and was not made there: nobody saw it made.

        In the backward, too, that may be memory of NumPy's. The gradient of a loss is counted as `losses`.
        """
        if not self.ended or (tensor.numel() > 1 and storage_key(tensor) not in self.stores):
            self.given[self.number(tensor)] = self.gaps.size(tensor)

    def came(self, tangents: dict[str, int], known: set[int], turn: _Turn) -> None:
        """The gradients that a backward was given: it holds them, and nobody else as far as is known.

        Where nothing was seen to make one, autograd has: it added some up, or copied one. The caller may have
        made a part of it, who was given that result: then it is there from the beginning of the backward on.
        """
        assert turn.piece.graph is not None
        value = turn.piece.graph.value
        sizes = {number: value[name].bytes for name, number in tangents.items() if number not in known}
        made = sizes if len(self.backward) > 1 else {}  # those of the first come from the caller
        results = Counter(
            value[name].bytes for name, number in turn.outputs.items() if number in self.returned
        )
        callers = {number: size for number, size in made.items() if results[size]}
        self.outside += 2 * sum(callers.values()) if self.guesses else 0
        self.before_backward[0] = _with(self.before_backward[0], callers)
        last = _with(self.before_backward[-1], {n: size for n, size in made.items() if n not in callers})
        self.before_backward[-1] = replace(last, reads=last.reads - set(tangents.values()))

    def alive(self) -> set[int]:
        return {store.number for store in self.stores.values() if not store.ref.expired()}

    # The forward

    def run(self, part: RunnableStep, step: RunnableStep, args: tuple[Any, ...]) -> Any:
        """One run of a piece, by a plan of its own or by another one."""
        piece: Piece = part.asked.piece
        self.before.append(self.gap(self.turns[-1].piece.where if self.turns else ""))
        turn = _Turn(self, len(self.turns), part, step, piece)
        self.turns.append(turn)
        with self.looking_away(), turn_under_way(turn):
            results = step(*args)
        self.begin_gap()
        node = backward_node(results, args)
        if node is not None:
            self.waiting.add(turn.place)
            self.nodes.add(node)
            node.register_prehook(untraced(lambda *_: self.begin_backward(turn)))
        return results

    def begin_gap(self) -> None:
        """A piece has run: what is not of a piece may run from here on."""
        self.after = self.alive()
        self.gaps.begin()

    def gap(self, where: str, needed: frozenset[int] = frozenset()) -> Between:
        """What ran since the last piece."""
        alive, taken = self.alive(), self.gaps.taken()
        writes = {number: size for number, size in self.new.items() if number in alive}
        self.new.clear()
        workspace = max(taken - sum(writes.values()), 0)
        sums, more = self.made_by_autograd(alive)
        writes |= {number: size for number, size in sums.items() if number not in self.written}
        self.written |= set(writes)
        reads = frozenset((alive | self.after | set(sums)) - needed)
        return Between(reads, writes, workspace + more, where)

    def made_by_autograd(self, alive: set[int]) -> tuple[dict[int, int], int]:
        """Sums of gradients that no node made, each in the place of its first part, and what making takes.

        Where autograd can it adds in that very place. Where none of the parts is there any more, it has not:
        then, for a moment, the sum is there beside its parts.
        """
        found, more = {}, 0
        for leaf, parts in self.sums.items():
            if len(parts) > 1 and alive.isdisjoint(parts):
                size = found[parts[0]] = self.gaps.size(leaf.variable)
                more = max(more, size if self.added.get(leaf) != len(parts) else 0)
                self.added[leaf] = len(parts)
        return found, more

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        before, self.gaps.away = self.gaps.away, True
        try:
            yield
        finally:
            self.gaps.away = before

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Count what the model's own code makes between pieces."""
        self.gaps.away = False
        try:
            with self.gaps.mode:
                yield
        finally:
            self.gaps.away = True

    def end_forward(self, result: Any, outside: int, *, guesses: bool) -> None:
        """The call returns; from here on the caller's own code runs, for which bytes are set aside.

        `guesses` says whether that is a guess, to be made again where gradients of more results come.
        """
        tensors = [leaf for leaf in _leaves(result) if is_tensor(leaf)]
        self.returned = frozenset(self.number(leaf) for leaf in tensors)
        scalars = [leaf for leaf in tensors if leaf.numel() == 1 and leaf.grad_fn is not None]
        self.losses = {
            next(_numbers): self.gaps.size(leaf) for leaf in scalars if leaf.grad_fn not in self.nodes
        }
        self.outside, self.guesses = outside, guesses
        self.before.append(self.gap(""))
        self.after, self.ended = self.alive(), True
        nodes = list(nodes_between(tensors, self.nodes))
        targets = {node: [leaf_of(following) for following, _ in node.next_functions] for node in nodes}
        parts = Counter(leaf for leaves in targets.values() for leaf in leaves if leaf is not None)
        self.sums = {leaf: [] for leaf, count in parts.items() if count > 1}
        edges = summed([*nodes, *self.nodes])
        for node in nodes:
            node.register_prehook(self.enter)
            to_sums = [edges.get(edge) for edge in node.next_functions]
            node.register_hook(partial(self.leave, targets[node], to_sums))
        self.nodes.clear()  # they hold what was saved

    # The backward

    def enter(self, gradients: Sequence[Any]) -> None:
        """Count what one of autograd's nodes makes that is not of a piece, and sums that it is given."""
        for gradient in gradients:
            if is_tensor(gradient) and gradient.numel() > 1 and storage_key(gradient) not in self.stores:
                self.gaps.make(gradient)
        self.gaps.away = False
        self.gaps.mode.__enter__()

    def leave(
        self, leaves: Sequence[Any], to_sums: Sequence[int | None], gradients: Sequence[Any], _: Any
    ) -> None:
        """The node has run; what it gave for parameters that others give gradients for is noted.

        Where others gave gradients for the same result, autograd adds them now: the sum is beside its parts.
        """
        self.gaps.mode.__exit__(None, None, None)
        self.gaps.away = True
        for added, gradient in zip(to_sums, gradients, strict=False):
            if added is not None and is_tensor(gradient):
                self.gaps.note_peak(beside=self.gaps.size(gradient) if added in self.begun else 0)
                self.begun.add(added)
        for leaf, gradient in zip(leaves, gradients, strict=False):
            if leaf in self.sums and is_tensor(gradient):
                self.sums[leaf].append(self.number(gradient))

    def begin_backward(self, turn: _Turn) -> None:
        if turn.place not in self.waiting:
            return
        self.nested |= not self.ended
        gap = self.gap("", self.still_needed())
        if not self.backward:  # `loss.backward()` holds the gradient of a loss that is of no piece
            gap = replace(gap, writes={**gap.writes, **self.losses})
        self.before_backward.append(gap)
        self.waiting.discard(turn.place)
        self.backward.append(turn.place)
        self.under_way += 1
        when_backward_ends(self.end_backward)
        begin_backward(turn)

    def end_backward(self) -> None:
        """A backward that went through a piece has ended; after an error none does."""
        self.under_way -= 1

    def still_needed(self) -> frozenset[int]:
        """What pieces hold themselves whose backward is still to come."""
        return frozenset().union(*(self.turns[place].rereads for place in self.waiting))

    @property
    def complete(self) -> bool:
        """Whether the whole step was seen; to be asked before the next call, when no backward runs."""
        return self.ended and bool(self.backward) and not self.under_way

    def absent(self) -> dict[Piece, frozenset[int]]:
        """The places of results whose gradients did not come in any turn of a piece."""
        found: dict[Piece, frozenset[int]] = {}
        for turn in self.turns:
            if turn.absent is not None:
                found[turn.piece] = found.get(turn.piece, turn.absent) & turn.absent
        return found

    @cached_property
    def seen(self) -> BrokenStep:
        """The step as it was seen; what ran after its last piece is looked at when this is asked for."""
        of_pieces = {n for turn in self.turns for n in (*turn.inputs.values(), *turn.outputs.values())}
        end = self.gap("")
        end = replace(end, reads=end.reads | set(self.losses))
        return BrokenStep(
            tuple(turn.seen() for turn in self.turns),
            tuple(self.backward),
            tuple(self.before),
            (*self.before_backward, end),
            self.returned,
            self.outside,
            sum(size for number, size in self.given.items() if number not in of_pieces),
        )


def _with(between: Between, made: Mapping[int, int]) -> Between:
    """What runs there, and makes some more."""
    return replace(between, writes={**between.writes, **made})
