"""A capped step that torch captures in pieces: several graphs under one budget.

The first call of such a step is looked at (`passages.py`) while each piece runs by the plan that saves least.
Before the next call the pieces are planned together (`planner/joined_budget.py`): the plan that the user sees
is of the whole step, with what is not captured in its place. A call that turns out to be of other pieces than
were seen goes on by the plans that save least, and the next calls are looked at again until it was seen
whole. Steps that were seen are kept, `max_plans` of them; those that begin alike share their plans as far as
they are alike.

Limits: the eager executor and the method "auto". Compiled pieces, pieces whose layers may keep a sketch,
steps with collectives, and `backend="lowtide"`, which sees no calls, are planned piece by piece.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from .._torch import in_process_group, private, untraced
from ..console.log import planning
from ..console.user_frames import own_lines
from ..devices.allocator import rounded
from ..devices.baseline import fixed_bands, states
from ..devices.memory import memory_of
from ..devices.optimizers import state_bytes
from ..errors import PlanMismatch
from ..options import Options, limit
from ..pipeline.eager_step import eager_runner
from ..pipeline.in_flight import BAND, Call, fits_beside, keep_account, refuse_if_over
from ..pipeline.optimizer_steps import seen, seen_for
from ..pipeline.pieces import Piece, call_under_way, is_tensor, note_saved
from ..pipeline.runnable_step import RunnableStep, backward_node
from ..planner.arenas import allocated_alone
from ..planner.joined_budget import Chosen, Ladders, plan_together
from ..planner.joined_graph import BrokenStep, join
from ..plans.planned_step import Plan
from ..process_wide import here
from ..units import parse_budget
from .kept_plans import KeptPlans
from .passages import Passage
from .piece_notes import notes_on_pieces, say_pieces

__all__ = ["Pieces", "are_joined"]

Key = tuple[int, ...]
"""The pieces of a step in the order in which they run."""

_leaves = private("tree_leaves")

_NUMBER = 4
"""Bytes of a loss that is computed outside of the step, and of its gradient."""

_LOOKS = 64
"""Calls that are looked at for one that goes another way again: looking takes time at every op. Chosen."""


def are_joined(options: Options) -> bool:
    """Whether the pieces of a step are planned together."""
    plain = options.executor == "eager" and options.method == "auto" and not options.split
    given = options.budget is not None and options.plan is None
    return options.allow_breaks and plain and given and not in_process_group()


@dataclass(eq=False)
class _Call:
    """A call under way: the pieces that ran, and who looks at it."""

    passage: Passage | None
    way: list[int] = field(default_factory=list)
    strayed: bool = False
    whole: bool = True
    node: Any = None

    @property
    def done(self) -> Key:
        """The pieces that have run by now."""
        return tuple(self.way)


class _UnderWay(threading.local):
    call: _Call | None = None


_here = _UnderWay()


@dataclass(eq=False)
class Pieces:
    """The pieces of one entry, the steps that were seen of them, and their plans."""

    entry: Any
    say: Callable[..., None]
    pieces: dict[int, Piece] = field(default_factory=dict)
    steps: KeptPlans[tuple[BrokenStep, tuple[Piece, ...]]] = field(init=False)
    looked_at: Passage | None = None
    chosen: dict[Key, Chosen] = field(default_factory=dict)
    turns: dict[Key, Plan] = field(default_factory=dict)
    followed: dict[tuple[int, int], RunnableStep] = field(default_factory=dict)
    counted: dict[Any, int] = field(default_factory=dict)
    last: Key = ()
    look: bool = True
    looks: int = 0
    lacking: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.steps = KeptPlans(self.options.max_plans, self.say)
        self.entry = weakref.proxy(self.entry)

    @property
    def options(self) -> Options:
        options: Options = self.entry.options
        return options

    @property
    def plan(self) -> Plan | None:
        """The plan of the last step as a whole; None where it was not planned as a whole yet."""
        found = self.chosen.get(self.last)
        return None if found is None else found.plan

    @property
    def unsettled(self) -> bool:
        """Whether they are going to be planned together, and are not yet."""
        return self.look and self.plan is None

    def piece(self, module: fx.GraphModule) -> Piece:
        """What is known of a new piece: where torch ended it, if it broke its graph there."""
        reason: Any = getattr(module, "compile_subgraph_reason", None)
        broken = reason is not None and reason.graph_break
        shown = own_lines(list(reason.user_stack))[-1:] if broken else []
        where = "".join(f"{line.filename.rpartition('/')[2]}:{line.lineno}" for line in shown)
        return Piece(module, where)

    # Calls

    @contextmanager
    def call(self, args: Any) -> Iterator[Callable[[Any], None]]:
        """A call of the step; what it gives is to be told of the result."""
        passage = Passage(_device(args)) if self.look else None
        refuse_if_over(self.entry.caller, self.plan)
        call = _Call(passage)
        with here(_here, call=call), call_under_way(), passage.looking() if passage else nullcontext():
            yield lambda result: self.end(call, result)

    def end(self, call: _Call, result: Any) -> None:
        """The call returns."""
        self.last = call.done
        if call.done in self.steps:
            self.steps.use(call.done)
        passage = call.passage
        if not call.whole:
            self.give_up("layers of a piece of this step may keep a sketch")
        elif passage is not None and passage.nested:
            self.give_up(f"a backward of {self.entry.caller.name} runs inside of its call")
        elif passage is not None and call.done:
            guesses = isinstance(self.options.outside, str)
            passage.end_forward(result, _outside(self.options, result), guesses=guesses)
            self.looked_at = passage
        if call.strayed:
            self.look_again()
            self.say(
                f"this call of {self.entry.caller.name} ran other pieces than those planned together. They "
                "ran by the plans that save least, and nothing is promised of their peak together. Next "
                "calls are looked at until this way was seen whole, and it is planned with the others then"
            )
        plan = self.plan
        if call.node is not None and plan is not None:
            entry = self.entry
            keep_account(call.node, Call(entry.caller, plan, entry.autocast, limit(self.options, plan)))

    def give_up(self, why: str) -> None:
        """Leave each piece to itself for good."""
        self.look = False
        self.say(f"{why}: its pieces are not planned together, and the promise covers each of them by itself")

    def run(self, part: RunnableStep, args: tuple[Any, ...]) -> tuple[RunnableStep, Any]:
        """One run of a piece, by its plan in the step that the call seems to be."""
        call = _here.call
        if call is None or part.plan is None:
            return part, part(*args)
        if part.asked.piece is not None and part.asked.piece.stale:
            self.renew(part, args)
        call.way.append(id(part))
        plan = self.turns.get(call.done)
        step = part if plan is None else self.following(part, plan, args)
        call.strayed |= plan is None and bool(self.turns)
        call.whole &= part.asked.piece is not None and part.asked.piece.graph is not None
        if call.passage is not None and call.whole:
            results = call.passage.run(part, step, args)
        else:
            results = step(*args)
        assert step.plan is not None
        note_saved(step.plan)
        node = backward_node(results, args)
        if node is not None and call.passage is None:
            node.register_prehook(untraced(partial(self.must_be_foretold, call.way, len(call.way) - 1)))
        call.node = node or call.node
        return step, results

    def must_be_foretold(self, way: list[int], place: int, *_: Any) -> None:
        """Called before the backward of a turn: the call that was looked at may have gone without it."""
        key = tuple(way)
        seen = self.steps.get(key)
        if seen is None or place in seen[0].backward or key in self.lacking:
            return
        self.lacking.add(key)
        self.look_again()
        self.say(
            f"the backward of {self.entry.caller.name} goes through pieces that it did not go through in the "
            "call that was looked at: this one may take more than was planned. Next calls are looked at "
            "until one goes through all of them"
        )

    def look_again(self) -> None:
        """Look at the next calls, until one shows what was not known."""
        self.look, self.looks = True, _LOOKS

    def following(self, part: RunnableStep, plan: Plan, args: tuple[Any, ...]) -> RunnableStep:
        """The piece by one of its plans; by its own where it is another graph now."""
        key = id(part), id(plan)
        if key not in self.followed:
            asked = replace(part.asked, options=replace(self.options, budget=None, plan=plan))
            try:
                with private("without_modes")():
                    runner = eager_runner(asked, asked.piece.module, args, self.entry.caller.holds)
            except PlanMismatch:
                self.forget()
                return part
            self.followed[key] = RunnableStep(asked, part.caller, runner, part.conditions, part.stepping)
        return self.followed[key]

    def renew(self, part: RunnableStep, args: tuple[Any, ...]) -> None:
        """Capture a piece anew, with what is known of it now."""
        part.asked.piece.stale = False
        with private("without_modes")():
            part.runner = eager_runner(part.asked, part.asked.piece.module, args, self.entry.caller.holds)

    def forget(self) -> None:
        """What was seen is of other graphs than there are now: look again."""
        self.steps.clear()
        self.lacking.clear()
        self.chosen, self.turns, self.followed, self.look = {}, {}, {}, True

    # Plans

    def settle(self) -> None:
        """Plan the steps that were seen, before the next call; nothing where all are planned."""
        passage = self.looked_at
        if passage is None or not passage.complete:
            return
        key = tuple(id(turn.part) for turn in passage.turns)
        if self.knows(key, passage):  # another way than this was taken, and is looked for
            self.looks -= 1
            self.look = self.looks > 0
        elif not self.with_what_came(passage):
            if key not in self.steps:
                self.steps.make_room(key)
            self.steps[key] = passage.seen, tuple(turn.piece for turn in passage.turns)
            self.chosen.pop(key, None)
            self.lacking.discard(key)
            with planning():
                self.plan_together()  # where the budget is too small for them, each call asks again
            self.look = False
        self.looked_at = None

    def knows(self, key: Key, passage: Passage) -> bool:
        """Whether a step is planned, and a call shows no more of its backward than was seen of it."""
        return key in self.chosen and not set(passage.backward) > set(self.steps[key][0].backward)

    def with_what_came(self, passage: Passage) -> bool:
        """Have pieces captured anew whose backward got fewer gradients than it could, and look again.

        A number that Python reads (`.item()`) is a result of its piece, and its gradient never comes.
        """
        if self.options.differentiate == "all":
            return False
        absent = passage.absent()
        changed = {piece for piece, places in absent.items() if places > piece.absent and not piece.settled}
        for piece in changed:
            piece.absent, piece.stale, piece.settled = absent[piece], True, True
        return bool(changed)

    def plan_together(self) -> None:
        """One budget over the pieces of all steps that a call may turn out to be."""
        budget = self.options.budget
        assert budget is not None
        ladders = {key: self.ladders(step, pieces) for key, (step, pieces) in self.steps.items()}
        some = next(iter(ladders.values()))
        device = memory_of(some.plans[0][0].graph, None)

        def notes(ladders: Ladders, chosen: Chosen) -> Iterator[str]:
            yield from notes_on_pieces(ladders.step, chosen.turns)
            yield from allocated_alone(device, "steps in pieces are not replayed")

        before, self.chosen = self.chosen, plan_together(ladders, budget, device, notes)
        if self.entry.beside and not all(map(self.fits, self.chosen.values())):
            least = plan_together(ladders, parse_budget("min"), device, notes)
            self.chosen = {key: _for_the_budget_of(self.chosen[key], least[key]) for key in least}
        self.turns = {
            key[: place + 1]: plan
            for key, chosen in self.chosen.items()
            for place, plan in enumerate(chosen.turns)
        }
        self.followed = {}
        for key, chosen in self.chosen.items():
            if key not in before:
                say_pieces(chosen)
                for note in chosen.plan.notes:
                    self.say(note, whatever_numbers=True)

    def fits(self, chosen: Chosen) -> bool:
        """Whether the calls in flight keep their budget beside one by that plan."""
        return fits_beside(self.entry.caller, chosen.plan)

    def ladders(self, step: BrokenStep, pieces: tuple[Piece, ...]) -> Ladders:
        """The plans of each turn, and what is there beside the step."""
        plans = tuple(piece.plans(self.options.planning_seconds) for piece in pieces)
        bare = join(step, [each[0] for each in plans], fixed={}).graph
        device = torch.device(bare.device)
        others = [one for _, one in seen_for(self.trained(), device)]
        counted = states(self.options.optimizer, others, device)
        self.counted = {seen(state.optimizer): state.held + state.coming for state in counted}
        fixed = fixed_bands(bare, device, counted, present=True, in_flight=self.entry.beside)
        others_read = step.beside if device.type == "cpu" else 0  # on CUDA they are among the others
        loss = 2 * rounded(_NUMBER, device) if step.outside and self.options.outside == "auto" else 0
        more = {BAND: self.entry.beside, "read between pieces": others_read, "loss": loss}
        return Ladders(step, plans, {**fixed, **{name: size for name, size in more.items() if size}})

    def trained(self) -> list[weakref.ref[torch.Tensor]]:
        refs = (ref for part in self.entry.parts for ref in part.inputs.trained)
        return list({id(ref()): ref for ref in refs}.values())

    def uncounted_state(self) -> int:
        """The bytes of optimizer state that are there now and that the plans do not count."""
        plan = self.plan
        if plan is None:
            return 0
        device = torch.device(plan.graph.device)
        found = seen_for(self.trained(), device)
        return sum(max(0, state_bytes(one, device) - self.counted.get(key, 0)) for key, one in found)


def _for_the_budget_of(fastest: Chosen, least: Chosen) -> Chosen:
    """The smallest plan, which holds less beside calls in flight, in the place of the fastest one."""
    return replace(
        least, plan=replace(least.plan, budget=fastest.plan.budget, smallest=fastest.plan.smallest)
    )


def _device(args: Any) -> torch.device:
    """The device that a step runs on, by what it is called with."""
    devices = {leaf.device for leaf in _leaves(args) if isinstance(leaf, torch.Tensor)}
    others = sorted((device for device in devices if device.type != "cpu"), key=str)
    return others[0] if others else torch.device("cpu")


def _outside(options: Options, result: Any) -> int:
    """Bytes for a loss that the caller computes, as for a step of one graph (`outside_loss.py`)."""
    if not isinstance(options.outside, str):
        return options.outside
    tensors = [leaf for leaf in _leaves(result) if is_tensor(leaf) and leaf.requires_grad]
    if not tensors or any(leaf.numel() == 1 for leaf in tensors):
        return 0
    sizes = (
        max(leaf.element_size(), 4) if torch.is_autocast_enabled() else leaf.element_size()
        for leaf in tensors
    )
    return 2 * sum(
        rounded(leaf.numel() * size, leaf.device) for leaf, size in zip(tensors, sizes, strict=True)
    )
