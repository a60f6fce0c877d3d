"""What the sketched layers of a model share: the mask of its real rows, and the sketches of common inputs.

Query, key and value layers read one input, which plain PyTorch keeps once. So a sketch is looked up by the
memory that its input lies in and by how often that was written to. Neither the input nor the sketch is
kept alive for this. While torch.compile traces the whole model, inputs are compared as they are traced.

Whether a layer draws a seed must not depend on what happens to be alive: a checkpoint that recomputes a part
of the model puts the random state back, and dropout after a layer must find it as it was. So a seed is drawn
for each input of a `Frame`: one call of the model, or one run of a checkpointed part of it. Where no frame is
known, every layer draws.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .._torch import in_backward, present_trace, private, private_of, storage_key, writes_traced
from . import marker
from .choice import Choice, fixed
from .draw import draw_seed
from .kind import Kept

__all__ = ["Scope"]


class Scope:
    """The mask of a model's present batch, and weak references to the sketches that there are.

    Copies and pickled ones start without either.
    """

    def __init__(self) -> None:
        self.real: torch.Tensor | None = None
        self.call: _Call | None = None
        self.sketches: dict[Any, _Entry] = {}
        self.trace: int | None = None
        self.traced: list[_Traced] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Scope, ()

    def enter(self, real: torch.Tensor | None) -> None:
        """The model is called, with a mask of its batch."""
        self.real = real
        self.call = _Call()
        self.trace = present_trace()
        self.traced = []

    def leave(self) -> None:
        """The call is over. The mask stays, for a checkpoint that recomputes a part in the backward."""
        self.call = None
        self.trace = None
        self.traced = []

    def real_rows(self, x: torch.Tensor) -> torch.Tensor | None:
        """Which rows of x are real, where the mask has the shape of its rows."""
        if self.real is None or self.real.shape != x.shape[:-1]:
            return None
        return self.real.reshape(-1) if self.call is not None or in_backward() else None

    def sketch(
        self, source: torch.Tensor, x: torch.Tensor, choice: Choice, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, Kept]:
        """A seed and the sketch of x, which is the source or a cast of it: those there are, or new ones."""
        if torch.compiler.is_compiling():
            return self.trace_sketch(source, x, choice, real)
        if source.is_inference():
            seed = draw_seed(x)
            return seed, _compress(x, choice, seed, real)
        storage = source.untyped_storage()
        place = (storage_key(source), source.storage_offset(), source.stride(), source.dtype)
        key = (*place, x.shape[:-1].numel(), x.shape[-1], x.dtype, choice)
        state = (private_of(source, "version"), None if real is None else id(self.real))
        if key not in self.sketches:
            weakref.finalize(storage, self.sketches.pop, key, None).atexit = False
        entry, frame = self.sketches.get(key), self.frame()
        seed, kept = _find(entry if entry is not None and entry.state == state else None, frame, x)
        kept = kept or _compress(x, choice, seed, real)
        self.sketches[key] = _Entry(state, frame, seed, tuple(map(_Weak, kept)))
        return seed, kept

    def frame(self) -> Frame | None:
        """What an input is new to: a call of the model, or a run of a part that is checkpointed."""
        hooks = private("saving_hooks")(True)  # a checkpoint has hooks of its own on what autograd saves
        if hooks is None and (self.call is None or in_backward()):
            return None
        return Frame(_reference(self.call), _reference(None if hooks is None else hooks[0]))

    def trace_sketch(
        self, source: torch.Tensor, x: torch.Tensor, choice: Choice, real: torch.Tensor | None
    ) -> tuple[torch.Tensor, Kept]:
        """The same while a step is traced; shared within one trace of the whole model only."""
        whole = self.trace is not None and self.trace == present_trace()
        if whole:
            asked = (x.dtype, choice, writes_traced())
            for entry in self.traced:
                if entry.source is source and entry.asked == asked:
                    return entry.seed, entry.kept
        seed = draw_seed(x)
        kept = _compress(x, choice, seed, real)
        if whole:
            self.traced.append(_Traced(source, (x.dtype, choice, writes_traced()), seed, kept))
        return seed, kept


class _Call:
    """One call of the model."""


class Frame(NamedTuple):
    """Weak references to a call of the model and to the hooks of a checkpoint; None where there is none."""

    call: weakref.ref[Any] | None
    hook: weakref.ref[Any] | None

    def is_now(self, other: Frame | None) -> bool:
        """Whether it is the same frame, and neither of its parts is gone."""
        if other is None or (self.call is None) != (other.call is None):
            return False
        mine, others = ([r() for r in frame if r is not None] for frame in (self, other))
        return len(mine) == len(others) and all(
            a is b and a is not None for a, b in zip(mine, others, strict=True)
        )


def _reference(part: Any) -> weakref.ref[Any] | None:
    try:
        return None if part is None else weakref.ref(part)
    except TypeError:
        return weakref.ref(_Call())  # gone at once: in this frame every layer draws


class _Entry(NamedTuple):
    """A sketch, with the state of its input and mask and the frame that it was made in."""

    state: tuple[int, int | None]
    frame: Frame | None
    seed: torch.Tensor
    kept: tuple[_Weak, ...]


class _Traced(NamedTuple):
    """A sketch while it is traced; nothing was written to in place since where `asked` is still the same."""

    source: torch.Tensor
    asked: tuple[torch.dtype, Choice, int]
    seed: torch.Tensor
    kept: Kept


class _Weak:
    """A tensor that is looked for by its memory: autograd may hold it as another object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = weakref.ref(tensor.untyped_storage())
        self.like = tensor.dtype, tensor.device, tensor.shape, tensor.stride()

    def __call__(self) -> torch.Tensor | None:
        storage = self.storage()
        if storage is None:
            return None
        dtype, device, shape, stride = self.like
        found: torch.Tensor = torch.empty(0, dtype=dtype, device=device)
        return found.set_(storage, 0, shape, stride)  # type: ignore[call-overload,no-any-return]


def _find(entry: _Entry | None, frame: Frame | None, x: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    """The seed for an input, drawn where it is new to its frame, and the sketch if it is still there."""
    known = entry is not None and entry.frame is not None and entry.frame.is_now(frame)
    seed = None if known else draw_seed(x)
    kept = () if entry is None else tuple(weak() for weak in entry.kept)
    there = bool(kept) and all(tensor is not None for tensor in kept)
    if entry is not None and (known or there):
        seed = entry.seed
    assert seed is not None
    return seed, kept if there else ()  # type: ignore[return-value]


def _compress(x: torch.Tensor, choice: Choice, seed: torch.Tensor, real: torch.Tensor | None) -> Kept:
    rows = x.detach().reshape(-1, x.shape[-1])
    k = choice.rows(fixed(rows.shape[0]))
    if marker.is_marked(choice):
        return tuple(marker.compress(rows, seed, choice.kind, k, real))
    return choice.made.compress(rows, seed, k, real)
