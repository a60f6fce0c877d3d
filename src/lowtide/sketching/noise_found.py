"""`lowtide.noise`: what sketches save and what they cost, layer by layer, on a batch of the user's own.

One forward and backward runs as it is. At every layer its input and its output gradient give the variance of
the sketched weight gradient by the closed form of its kind, and beside it the variance that the gradient has
anyway, as a sum over rows that were drawn at random. Their ratio is what to look at: at 1, the
gradient is as noisy as that of half the batch would be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..arguments import function, mapping, number
from ..errors import LowtideError
from ..measuring.trial import Trial
from ..units import format_bytes
from .choice import Choice
from .layers import Layers, chosen_layers, is_sketched, refuse_compiled, shown
from .mask import Rows, check_rows, leave, watch
from .recorder import Call, Recorder
from .scope import Scope

__all__ = ["LayerNoise", "Noise", "noise", "noise_of"]


@dataclass(frozen=True)
class LayerNoise:
    """A layer's sketch: `bytes` of the input are kept as `kept`, and `variance` is added to SGD's `own`.

    `rows` are those that are real. `needed` is the least rate that keeps to the asked ratio of the two; at 1
    the input is kept as it is. `shares` names an earlier layer with the same input, whose sketch serves both.
    `hidden` is the share of the squared output gradient in rows that the mask says are not real: it is lost,
    so anything above rounding means a wrong mask.
    """

    name: str
    choice: Choice
    rows: int
    bytes: int
    kept: int
    variance: float
    own: float
    needed: float
    shares: str | None = None
    hidden: float = 0.0

    @property
    def ratio(self) -> float:
        """The variance of the sketch, in variances of SGD itself."""
        return self.variance / self.own if self.own else float("inf") if self.variance else 0.0

    @property
    def saved(self) -> int:
        """The bytes that are not kept any longer, where nothing else keeps the input."""
        return 0 if self.shares is not None else self.bytes - self.kept


@dataclass(frozen=True)
class Noise:
    """What `noise` found, layer by layer; prints as a table. `at` is the ratio that rates are given for.

    >>> import lowtide, torch
    >>> found = lowtide.noise(torch.nn.Linear(64, 8), torch.randn(100, 64), rate=0.1)
    >>> found.saved
    22976
    """

    layers: tuple[LayerNoise, ...]
    at: float

    @property
    def saved(self) -> int:
        """The bytes that all layers save."""
        return sum(layer.saved for layer in self.layers)

    def needed(self, name: str) -> float:
        """The rate that keeps a layer, and those that share its input, to the asked ratio."""
        return max(layer.needed for layer in self.together(name))

    def together(self, name: str) -> list[LayerNoise]:
        """A layer and those that share its input."""
        found = {layer.name: layer for layer in self.layers}
        first = found[name].shares or name
        return [layer for layer in self.layers if first in (layer.name, layer.shares)]

    def __str__(self) -> str:
        head = ("layer", "rows", "input", "kept", "noise / SGD's own", f"rate for {self.at:g}")
        rows = [head, *map(_cells, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_padded(row, widths)).rstrip() for row in rows]
        lines.append(f"saves {format_bytes(self.saved)}, where nothing else keeps these inputs")
        lines += [
            f"WRONG MASK: {layer.hidden:.2g} of the squared gradient of {shown(layer.name)} is in rows that "
            "rows= leaves out, and is lost"
            for layer in self.layers
            if layer.hidden > 1e-6
        ]
        return "\n".join(lines)


def noise(
    model: nn.Module,
    *batch: Any,
    rate: float | None = None,
    kind: str | None = None,
    layers: Layers = None,
    rows: Rows = None,
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    at: float = 1.0,
) -> Noise:
    """The noise that sketches add to the weight gradients of a model, on one batch.

    Of a sketched model it tells about its sketches; of another one, about those that `lowtide.sketch` would
    make of the same `rate`, `kind`, `layers` and `rows`. `loss` turns the model's output into what backward
    is called on; without it the scalar outputs are used, or all outputs with made-up gradients where there is
    no scalar. `at` is a ratio of variances, for which each layer's rate is given.

    The step keeps every layer's input, as without sketches. Gradients, buffers and random state are as they
    were.

    >>> import lowtide, torch
    >>> found = lowtide.noise(torch.nn.Linear(64, 8), torch.randn(100, 64), rate=0.1)
    >>> found.layers[0].rows, found.layers[0].kept
    (100, 2624)
    """
    at = number("at", at)  # in variances of SGD itself
    kwargs = mapping("kwargs", kwargs)
    if loss is not None:
        function("loss", loss, "loss(output)")
    refuse_compiled(model)
    if not any(map(is_sketched, model.modules())):
        choices = dict.fromkeys(
            chosen_layers(model, layers), Choice.make("strided" if kind is None else kind, rate)
        )
    elif any(given is not None for given in (rate, kind, layers, rows)):
        raise LowtideError(
            "this model is sketched, and noise tells about its own sketches; lowtide.unsketch it to try "
            "others"
        )
    else:
        choices = None
    return noise_of(choices, model, batch, rows=rows, kwargs=kwargs, loss=loss, at=at)


def noise_of(
    choices: dict[str, Choice] | None,
    model: nn.Module,
    batch: tuple[Any, ...],
    *,
    rows: Rows,
    kwargs: dict[str, Any] | None,
    loss: Callable[[Any], torch.Tensor] | None,
    at: float,
) -> Noise:
    """The noise of such sketches of layers, by name; with None, of the sketches that there are."""
    recorder = Recorder()
    try:
        if choices is None:
            recorder.add_sketched(model)
        else:
            _add_asked(recorder, model, choices, rows)
        _run(Trial(model, batch, kwargs or {}, loss), model)
    finally:
        recorder.remove()
        if choices is not None:
            leave(model)
    if not any(call.all_rows for call in recorder.calls):
        raise LowtideError("no layer that is to be sketched got a gradient from this batch")
    return Noise(tuple(_layers(recorder, float(at))), float(at))


def _add_asked(recorder: Recorder, model: nn.Module, choices: dict[str, Choice], rows: Rows) -> None:
    check_rows(rows, model)
    scope = Scope()
    watch(model, scope, rows)
    for name, choice in choices.items():
        recorder.add(name, model.get_submodule(name), choice, scope)


def _run(trial: Trial, model: nn.Module) -> None:
    try:
        trial.run(model)
    finally:
        trial.restore()


def _layers(recorder: Recorder, at: float) -> list[LayerNoise]:
    made: list[LayerNoise] = []
    first: dict[Any, str] = {}
    for name, calls in recorder.by_layer():
        source = (calls[0].source, calls[0].choice)
        shares = first.setdefault(source, name) if len(calls) == 1 else name
        made.append(_layer(name, calls, at, None if shares == name else shares))
    return made


def _layer(name: str, calls: list[Call], at: float, shares: str | None) -> LayerNoise:
    own = sum(call.own for call in calls)
    return LayerNoise(
        name=name,
        choice=calls[0].choice,
        rows=sum(call.rows for call in calls),
        bytes=sum(call.bytes for call in calls),
        kept=sum(call.kept(call.choice) for call in calls),
        variance=sum(call.variance(call.choice) for call in calls),
        own=own,
        needed=_needed(calls, at * own),
        shares=shares,
        hidden=max(call.hidden for call in calls),
    )


def _needed(calls: list[Call], most: float) -> float:
    """The least rate, in steps of one row, whose variance is at most so much."""
    choice, rows = calls[0].choice, max(call.all_rows for call in calls)

    def fits(kept: int) -> bool:
        return sum(call.variance(Choice(choice.kind, kept / rows)) for call in calls) <= most

    if not choice.made.has_rate:
        return 0.0 if fits(rows) else 1.0
    low, high = 0, rows
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / rows


def _cells(layer: LayerNoise) -> tuple[str, ...]:
    has_rate = layer.choice.made.has_rate
    how = f"{layer.choice.kind} {layer.choice.rate:g}" if has_rate else layer.choice.kind
    kept = f"{format_bytes(layer.kept)} ({how})" if layer.shares is None else f"as {shown(layer.shares)}"
    needed = f"{layer.needed:.3g}" if has_rate else "-"
    return (
        shown(layer.name), str(layer.rows), format_bytes(layer.bytes), kept, f"{layer.ratio:.3g}", needed
    )  # fmt: skip


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        cell.ljust(width) if not i else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
