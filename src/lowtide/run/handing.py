"""Gradients on their way out: a backward that pauses, and a node of autograd for each group of them.

The backward of a step is one node of autograd, and what a node returns travels on when it has ended. So
awaited inputs reach the step through a chain of further nodes, one per group:

    parameters of group 0 ──▶ gate 0 ──────▶ step
    parameters of group 1 ──▶ gate 1 ──────▶  ·
    all other inputs ───────▶ last gate ───▶  ·

The backward goes from right to left. The step's node only makes the backward function ready. Gate 0 lets it
run to its first pause and gives that group to its parameters, where autograd calls hooks at once; gate 1 lets
it run on to the second, and the last gate lets it end.

A gate is called after the one before it, since its token is an input of that one. The engine takes gradients
of leaves before anything else, so each group has arrived before the function goes on. Where autograd leaves a
gate out (`torch.autograd.grad` for some inputs), the next one runs past its group.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import Any

import torch

from .._torch import private

__all__ = ["Departures", "present_departures"]

Paused = Generator[list[Any], None, list[Any]]

_present = threading.local()


def present_departures() -> Departures | None:
    """Those of the call whose backward autograd is about to run in this thread; asked for once."""
    found, _present.departures = getattr(_present, "departures", None), None
    return found


class Departures:
    """The way out of one call's gradients: by groups of places among its inputs, the others at the end."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.groups = groups
        self.others: tuple[int, ...] = ()
        self.paused: Paused | None = None
        self.passed = 0

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the step, behind gates where they need a gradient."""
        out = list(args)
        handed = {place for group in self.groups for place in group}
        self.others = tuple(
            place
            for place, arg in enumerate(args)
            if place not in handed and isinstance(arg, torch.Tensor) and arg.requires_grad
        )
        token = None
        for number in reversed(range(len(self.groups) + 1)):
            places = self.places(number)
            if places:
                token, *behind = _Gate.apply(self, number, token, *(args[place] for place in places))
                for place, alias in zip(places, behind, strict=True):
                    out[place] = alias
        return out

    def places(self, number: int) -> Sequence[int]:
        return self.groups[number] if number < len(self.groups) else self.others

    def announce(self, *_: Any) -> None:
        """Called by autograd right before the backward of this call."""
        _present.departures = self

    def begin(self, paused: Paused) -> None:
        """Take over a backward that has not started; the first gate starts it."""
        self.paused, self.passed = paused, 0

    def leaving(self, number: int) -> list[Any]:
        """The gradients of a group: the backward runs until they are there."""
        if self.paused is None:
            return [None] * len(self.places(number))  # no gradient of an output has come
        gradients: list[Any] = []
        with private("without_autocast")():  # the trace has its casts
            while self.paused is not None and (self.passed <= number or self.is_last(number)):
                gradients = self.run_on() or gradients
        return gradients

    def is_last(self, number: int) -> bool:
        """Whether no gate comes after this one, so that the backward has to end with it."""
        return number == len(self.groups) - (not self.others)

    def run_on(self) -> list[Any]:
        """Let the backward run to its next pause, or to its end, and take what it hands over."""
        assert self.paused is not None
        try:
            handed = next(self.paused)
        except StopIteration as ended:
            self.paused = None
            return [ended.value[place] for place in self.others]
        self.passed += 1
        gradients = list(handed)
        handed.clear()  # the paused function holds the list, and autograd keeps what nobody else holds
        return gradients


class _Gate(torch.autograd.Function):
    """Inputs of a step as they are; their gradients are what the paused backward hands over for them."""

    @staticmethod
    def forward(
        ctx: Any, departures: Departures, number: int, token: torch.Tensor | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.departures, ctx.number = departures, number
        ctx.set_materialize_grads(False)
        ctx.token = token
        return torch.empty(0, device=inputs[0].device), *(tensor.detach() for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        # The token is its own gradient: autograd calls the gate that gets one in the thread of its device.
        return None, None, ctx.token, *ctx.departures.leaving(ctx.number)
