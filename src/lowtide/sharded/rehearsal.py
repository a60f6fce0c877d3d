"""A step of a sharded model, rehearsed: what is there at each moment besides what its units save and take.

The model's own code runs forward and backward on fake tensors, which have sizes and no bytes; nothing is
gathered or reduced, and nothing of the model changes. For each unit stands a function that makes outputs of
the right sizes, holds its inputs and outputs until its backward, as the unit will, and makes gradients for
its inputs. A tracker counts what is alive, a `Ledger` what FSDP adds. Out come, for each call of a unit, the
bytes beside it, and for each number of units that wait for their backward, the most bytes outside of all
units.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch import in_backward, private, private_of, set_private, storage_key
from ..capture.conditions import Conditions
from ..capture.plain_masks import masks_as_plain
from ..devices.allocator import rounded
from ..errors import CaptureError, LowtideError
from ..measuring.module_state import Attributes
from .fake_tensors import (
    FakeStorages,
    bytes_of,
    cast,
    copied,
    input_dtype,
    like,
    map_tensors,
    saving_nothing,
    tensors_in,
    tree_leaves,
)
from .fsdp_groups import Sharded, Unit, groups_of
from .fsdp_ledger import Group, Ledger

__all__ = ["Beside", "Rehearsal", "UnitCall", "rehearse"]


@dataclass(frozen=True)
class Beside:
    """The bytes at one moment, by what they are."""

    unsharded: int = 0
    buffers: int = 0
    gradients: int = 0
    outside: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.unsharded + self.buffers + self.gradients + self.outside


@dataclass
class UnitCall:
    """One call of a unit: its inputs, and what is there besides what units save, inputs included.

    `planned` is what `plan` of the rehearsal returned for it, `held` the sizes of its outputs. `late` are the
    calls after it that still wait for their backward when its own comes: none where they come in the opposite
    order.
    """

    unit: Unit
    key: Any
    planned: Any = None
    inputs: int = 0
    held: dict[int, int] = field(default_factory=dict)
    forward: Beside = Beside()
    backward: Beside = Beside()
    late: tuple[int, ...] = ()


@dataclass
class Rehearsal:
    """The calls of units in order, and the most that is there outside of them.

    `outside[n]` is the most while the first n calls wait for their backward and no unit runs. It is that of
    batches that fulfil the `conditions`, asked of their tensors in order.
    """

    groups: list[Group]
    calls: list[UnitCall] = field(default_factory=list)
    outside: dict[int, Beside] = field(default_factory=dict)
    conditions: Conditions | None = None

    def must_hold_for(self, batch: Any) -> None:
        """Raise OtherData for a batch whose code between the units goes another way."""
        if self.conditions is not None:
            self.conditions.must_hold(tensors_of_batch(batch))


def tensors_of_batch(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch that conditions may be asked of, each once."""
    leaves = {id(leaf): leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)}
    return [leaf for leaf in leaves.values() if not leaf.requires_grad]


def rehearse(
    sharded: Sharded,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    plan: Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any],
    key: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    outside: int | str = "auto",
) -> Rehearsal:
    """Run a step of a sharded model on fake tensors.

    `plan` is asked for a plan at each call of a unit, `key` for what tells such calls apart. `outside` are
    the bytes of a loss that the caller computes from the outputs.
    """
    return _Stage(sharded, plan, key).run(args, dict(kwargs), outside)


class _Stage:
    """The model with fake tensors in the place of its own, and what is noted while it runs."""

    def __init__(self, sharded: Sharded, plan: Any, key: Any) -> None:
        self.sharded = sharded
        self.plan, self.key = plan, key
        self.found = Rehearsal(sharded.groups())
        self.mode = private("FakeTensorMode")(allow_non_fake_inputs=True)
        self.tracker = FakeStorages(sharded.device, self.note)
        self.ledger = Ledger(self.found.groups, lambda _: self.note())
        self.waiting: list[int] = []
        self.passed: list[tuple[UnitCall, dict[int, int]]] = []
        self.unfinished: list[int] = []
        self.fakes: dict[int, torch.Tensor] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], outside: int | str) -> Rehearsal:
        with self.mode:
            self.anchor = torch.empty(0, device=self.sharded.device, requires_grad=True)
        with self.as_it_was(), self.mode, self.stood_in(), masks_as_plain():
            fake_args, fake_kwargs = map_tensors(torch.Tensor, self.fake, (args, kwargs))
            for real in tensors_of_batch((args, kwargs)):
                self.tracker.branches.give(self.fake(real), real)
            for leaf in tree_leaves((fake_args, fake_kwargs)):
                self.tracker.give(leaf)
            with self.tracker.mode, torch.enable_grad():
                self.step(fake_args, fake_kwargs, outside)
        self.found.conditions = self.tracker.branches.conditions()
        return self.found

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], outside: int | str) -> None:
        root = len(self.found.groups) - 1
        state = self.sharded.states[-1]
        self.ledger.enter_forward(root)
        args, kwargs = cast(input_dtype(state), (args, kwargs))
        output = self.sharded.root.forward(*args, **kwargs)
        output = cast(private_of(state, "fsdp_precision").output_dtype, output)
        self.ledger.exit_forward(root)
        ends = [leaf for leaf in tensors_in(output) if leaf.requires_grad]
        ends = list({id(leaf): leaf for leaf in ends}.values())
        if not ends:
            raise CaptureError("no output of the model needs a gradient: is every parameter frozen?")
        scalars = [leaf for leaf in ends if leaf.numel() == 1]
        if scalars:
            self.backward(scalars, [torch.ones_like(leaf) for leaf in scalars])
        else:
            wide = sum(rounded(leaf.nbytes, self.sharded.device) for leaf in ends)
            self.note(2 * wide if isinstance(outside, str) else outside)
            self.backward(ends, [torch.empty_like(leaf) for leaf in ends])

    def backward(self, ends: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        root = len(self.found.groups) - 1
        self.ledger.enter_backward(root)
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(ends, gradients)
        self.settle()
        own = {unit.group for unit in self.sharded.units if unit.whole}
        for group in [*self.unfinished, root]:
            self.ledger.exit_backward(group, gradients=None if group in own else 0)

    def note(self, more: int = 0) -> None:
        """Note a moment outside of units."""
        now = self.now(more)
        first = max(self.waiting, default=-1) + 1  # all of the calls up to the last that waits
        if now.total > self.found.outside.get(first, Beside()).total:
            self.found.outside[first] = now

    def now(self, more: int = 0) -> Beside:
        held = self.ledger
        return Beside(held.unsharded, held.buffers, held.gradients, self.tracker.alive + more)

    # Units

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a unit: its plan, and outputs as it gives them."""
        if in_backward():
            raise CaptureError(
                f"{unit.name} is recomputed in the backward by activation checkpointing of your own. A cap "
                "plans what is recomputed: take the checkpointing out, and cap the model then"
            )
        handed = cast(input_dtype(unit.state), (args, kwargs))
        if any(leaf.requires_grad for leaf in tensors_in(handed)):  # FSDP hands over other containers then
            handed = map_tensors(torch.Tensor, lambda tensor: tensor, handed)
        with self.tracker.looking_away():
            # Of copies: what torch keeps of a capture would keep the tensors of this step alive.
            planned = self.plan(unit, *copied(handed)) if torch.is_grad_enabled() else None
        if planned is None:  # it has no backward, and runs as it is
            return self.pass_through(unit, args, kwargs)
        args, kwargs = handed
        index = len(self.found.calls)
        found = UnitCall(unit, self.key(args, kwargs), planned)
        self.found.calls.append(found)
        self.ledger.enter_forward(unit.group)
        found.forward = self.now()
        self.tracker.unseen.clear()
        with self.tracker.looking_away(), saving_nothing():
            output = unit.forward(*args, **kwargs)
        output = self.stand_in(index, found, (args, kwargs), output)
        found.held |= self.tracker.count_what_stayed()
        self.ledger.exit_forward(unit.group)
        return cast(private_of(unit.state, "fsdp_precision").output_dtype, output)

    def stand_in(self, index: int, call: UnitCall, inputs: Any, output: Any) -> Any:
        tensors = list({id(leaf): leaf for leaf in tensors_in(inputs)}.values())
        call.inputs = bytes_of(tensors, self.sharded.device)
        made = {id(leaf): leaf for leaf in tensors_in(output) if not any(leaf is one for one in tensors)}
        if not made:
            return output
        outputs = _StandIn.apply(self, index, list(made.values()), self.anchor, *tensors)
        call.held = {storage_key(output): self.tracker.size(output) for output in outputs}
        self.waiting.append(index)
        self.note()
        new = dict(zip(made, outputs, strict=True))
        return map_tensors(torch.Tensor, lambda leaf: new.get(id(leaf), leaf), output)

    def begin_backward(self, index: int, gradients: tuple[Any, ...]) -> None:
        self.settle()
        call = self.found.calls[index]
        self.ledger.enter_backward(call.unit.group)
        self.waiting = [other for other in self.waiting if other != index]
        call.late = tuple(other for other in self.waiting if other > index)
        sizes = {storage_key(g): self.tracker.size(g) for g in gradients if g is not None}
        outputs = sum(size for key, size in call.held.items() if key in self.tracker.known)
        now = self.now()
        call.backward = Beside(
            now.unsharded, now.buffers, now.gradients, now.outside - outputs - sum(sizes.values())
        )
        self.passed.append((call, sizes))

    def end_backward(self, index: int, *, passes: bool) -> None:
        group = self.found.calls[index].unit.group
        if passes:
            self.ledger.exit_backward(group)
        else:
            self.unfinished.append(group)  # FSDP waits for the end of the whole backward

    def settle(self) -> None:
        """A gradient that came into a unit and is still there is held by somebody else, too."""
        for call, sizes in self.passed:
            still = sum(size for key, size in sizes.items() if key in self.tracker.known)
            b = call.backward
            call.backward = Beside(b.unsharded, b.buffers, b.gradients, b.outside + still)
        self.passed.clear()

    # Fake tensors

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like another one; the same one for the same one."""
        if id(tensor) not in self.fakes:
            made = like(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            self.fakes[id(tensor)] = torch.nn.Parameter(made, False) if is_parameter else made
            self.fakes[id(tensor)].requires_grad_(tensor.requires_grad)
        return self.fakes[id(tensor)]

    @contextmanager
    def stood_in(self) -> Iterator[None]:
        """The model's tensors are fake, and its units are stood in for."""
        self.fake_whole_parameters()
        for module in self.sharded.root.modules():
            for table in (private_of(module, "parameters"), private_of(module, "buffers")):
                for name, tensor in table.items():
                    if tensor is not None and not isinstance(tensor, private("FakeTensor")):
                        table[name] = self.fake(tensor)
                        self.tracker.leave_out(table[name])
        for unit in self.sharded.units:
            set_private(unit.module, "compiled_call", self.caller(unit))
        yield

    def caller(self, unit: Unit) -> Callable[..., Any]:
        run = self.call if unit.whole else self.pass_through
        return lambda *args, **kwargs: run(unit, args, kwargs)

    def pass_through(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A sharded module with others inside: its own code runs as it is."""
        args, kwargs = cast(input_dtype(unit.state), (args, kwargs))
        self.ledger.enter_forward(unit.group)
        marked = [leaf for leaf in tensors_in((args, kwargs)) if leaf.requires_grad]
        if marked:
            new = dict(zip(map(id, marked), _End.apply(self, unit.group, *marked), strict=True))
            args, kwargs = map_tensors(torch.Tensor, lambda t: new.get(id(t), t), (args, kwargs))
        else:
            self.unfinished.append(unit.group)
        output = unit.forward(*args, **kwargs)
        self.ledger.exit_forward(unit.group)
        for leaf in tensors_in(output):
            if leaf.requires_grad:
                leaf.register_hook(lambda _: self.ledger.enter_backward(unit.group))
        return cast(private_of(unit.state, "fsdp_precision").output_dtype, output)

    def fake_whole_parameters(self) -> None:
        """Parameters as they are after a gather: each in a block of its own, padded to equal parts."""
        for state in self.sharded.states:
            for group in groups_of(state):
                ranks = int(getattr(group.mesh_info, "shard_mesh_size", 1))
                for parameter in group.fsdp_params:
                    self.fake_whole(group, parameter, ranks)

    def fake_whole(self, group: Any, parameter: Any, ranks: int) -> None:
        sharded, size = parameter.sharded_param, private_of(parameter, "fsdp_size")
        dtype = group.mp_policy.param_dtype or sharded.dtype
        padded = parameter.padded_sharded_param_size.numel() * ranks
        block = torch.empty(padded, dtype=dtype, device=self.sharded.device)
        whole = torch.as_strided(block, size, private_of(parameter, "fsdp_stride"))
        made = self.fakes[id(parameter)] = torch.nn.Parameter(whole, requires_grad=sharded.requires_grad)
        self.tracker.leave_out(made)
        place = private_of(parameter, "fsdp_place")
        owners = [(place.module, place.param_name)]
        owners += zip(place.shared_modules, place.shared_param_names, strict=True)
        for module, name in owners:
            private_of(module, "parameters")[name] = made

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Put back what the model's own code changes: attributes, tables, Python's random numbers."""
        before, drawn = Attributes([self.sharded.root]), random.getstate()
        try:
            yield
        except LowtideError:
            raise
        except Exception as error:
            raise _not_rehearsed(error) from error
        finally:
            before.restore()
            random.setstate(drawn)


def _not_rehearsed(error: Exception) -> CaptureError:
    said = str(error).strip().partition("\n")[0]
    return CaptureError(
        "the step of a model that is sharded by fully_shard is rehearsed on fake tensors, to know what it "
        f"takes outside of its units, and that failed: {type(error).__name__}: {said}. Code of the model "
        "outside of its units may not look at values of tensors (`.item()`, `print`, `if tensor`): take that "
        "out, or move it to the training loop"
    )


class _StandIn(torch.autograd.Function):
    """Stands for a unit: outputs of its sizes, inputs and outputs held until its backward."""

    @staticmethod
    def forward(ctx: Any, stage: _Stage, index: int, like: list[Any], *inputs: torch.Tensor) -> Any:
        outputs = tuple(
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like
        )
        ctx.stage, ctx.index = stage, index
        ctx.mark_non_differentiable(*(o for o, t in zip(outputs, like, strict=True) if not t.requires_grad))
        ctx.save_for_backward(*inputs, *outputs)
        ctx.inputs = len(inputs)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        stage: _Stage = ctx.stage
        inputs, wanted = ctx.saved_tensors[: ctx.inputs], ctx.needs_input_grad[3:]
        stage.begin_backward(ctx.index, gradients)
        made = [torch.empty_like(i) if need else None for i, need in zip(inputs, wanted, strict=True)]
        stage.end_backward(ctx.index, passes=any(wanted[1:]))
        return None, None, None, *made


class _End(torch.autograd.Function):
    """Marks where the backward of a sharded module with others inside ends."""

    @staticmethod
    def forward(ctx: Any, stage: _Stage, group: int, *inputs: torch.Tensor) -> Any:
        ctx.stage, ctx.group = stage, group
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.stage.ledger.exit_backward(ctx.group, gradients=0)
        return None, None, *gradients
