"""`lowtide.sketch` and `lowtide.unsketch`: linear layers that keep a sketch of their input.

A sketched layer is the same module with another `forward`, which it carries as an attribute: its class,
parameters, hooks and `state_dict` stay as they were, and copies and pickled ones are sketched, too.

Bershatsky, Mikhalev, Katrutsa, Gusak, Merkulov, Oseledets, "Memory-Efficient Backpropagation through Large
Linear Layers" (2022).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..arguments import function, mapping, number
from ..console.log import log
from ..errors import LowtideError
from .choice import Choice
from .function import forward
from .layers import Layers, chosen_layers, is_sketched, refuse_compiled, refuse_sketched, shown
from .mask import Rows, check_rows, leave, watch
from .noise_found import Noise, noise_of
from .scope import Scope

__all__ = ["sketch", "unsketch"]

M = TypeVar("M", bound=nn.Module)


def sketch(
    model: M,
    rate: float | None = None,
    *,
    kind: str = "strided",
    layers: Layers = None,
    rows: Rows = None,
    max_noise: float | None = None,
    batch: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    always: bool = False,
) -> M:
    """Let linear layers keep a random sketch of their input, in place; returns the model.

    Outputs, input gradients and bias gradients stay exact. Weight gradients become random: right on average,
    with a variance that `lowtide.noise` shows. `rate` is the share of the rows that is kept (0.2 unless
    given); at 1 everything is exact. The kinds "int8" and "int4" keep every row in as many bits and take
    no rate; "strided" is the best of the others, which are there to compare with.

    `layers` are names or patterns as in "encoder.*.mlp", of layers or of modules around them, or a function
    of name and module; without it all `nn.Linear` that train are sketched. `rows` says which rows are real
    and not padding, whose gradient must be zero: the name of the model's argument that holds the mask, or a
    function of its arguments that gives one. It is used where its shape is that of a layer's input without
    the last dimension.

    With `max_noise` and a `batch` (a tuple of the model's arguments; `kwargs` and `loss` as in
    `lowtide.noise`), layers whose noise would be more than that multiple of SGD's own get as large a
    rate as they need, or are left as they are.

    Under `lowtide.cap` a layer keeps a sketch where the budget needs it and exact recomputation would take
    longer; with `always` it does in any case, as it does without a cap.

    Other layers may be sketched by another call, with other options.

    >>> import lowtide, torch
    >>> model = lowtide.sketch(torch.nn.Linear(64, 8), rate=0.1)
    >>> model(torch.randn(100, 64)).sum().backward()
    >>> model.weight.grad.shape
    torch.Size([8, 64])
    """
    kwargs = mapping("kwargs", kwargs)
    if loss is not None:
        function("loss", loss, "loss(output)")
    refuse_compiled(model)
    choice = Choice.make(kind, rate, always=always)
    found = chosen_layers(model, layers)
    refuse_sketched(found)
    check_rows(rows, model)
    if rows is not None and not choice.made.has_rate:
        raise LowtideError(f"rows= has no use with kind={kind!r}, which keeps all rows as they are")
    choices = dict.fromkeys(found, choice)
    if max_noise is not None:
        _check_max_noise(max_noise, batch, kwargs)
        measure = functools.partial(
            noise_of, model=model, batch=batch, rows=rows, kwargs=kwargs, loss=loss, at=max_noise
        )
        choices = _quiet_enough(choices, measure)
    elif not (isinstance(batch, tuple) and not batch) or kwargs or loss is not None:
        raise LowtideError("a batch is for max_noise=, which is not given; lowtide.noise shows the noise")
    scope = Scope()
    for name, chosen in choices.items():
        found[name].forward = functools.partial(forward, found[name], chosen, scope)  # type: ignore[method-assign]
    watch(model, scope, rows)
    return model


def unsketch(model: M) -> M:
    """Undo `sketch`, in all layers of the model; returns the model.

    >>> import lowtide, torch
    >>> model = lowtide.sketch(torch.nn.Linear(64, 8), rate=0.1)
    >>> lowtide.unsketch(model) is model
    True
    """
    refuse_compiled(model)
    found = [part for part in model.modules() if is_sketched(part)]
    if not found:
        raise LowtideError("no layer of this model is sketched: there is nothing to undo")
    for layer in found:
        del layer.forward
    for part in model.modules():
        leave(part)
    return model


def _quiet_enough(
    choices: dict[str, Choice], measure: Callable[[dict[str, Choice]], Noise]
) -> dict[str, Choice]:
    """Choices that keep to the noise that was asked for; a layer for which no rate is enough is left out.

    The rates that are needed follow from laws. That of strided sketches is a mean over orders of the rows, so
    what comes of them is measured, and they are raised until it fits the rows in the order that they have.
    """
    measured = measure(choices)
    rates = {layer.name: measured.needed(layer.name) for layer in measured.layers}
    while True:
        choices = _raised(choices, rates)
        if not choices:
            raise LowtideError(f"max_noise={measured.at:g} leaves no layer to sketch:\n{measured}")
        if not rates:
            return choices
        found = measure(choices)
        rates = {layer.name: rate for layer in found.layers if (rate := _quieter(found, layer.name))}


def _quieter(found: Noise, name: str) -> float:
    """A rate for a layer that is too loud, by as much as 1 / rate - 1 must fall; 0 for another one."""
    layers = found.together(name)
    loudest, rate = max(layer.ratio for layer in layers), layers[0].choice.rate
    if loudest <= found.at * (1 + 1e-6):
        return 0.0
    return max(1 / (1 + found.at / loudest * (1 / rate - 1)), rate + 1 / layers[0].rows)


def _raised(choices: dict[str, Choice], rates: dict[str, float]) -> dict[str, Choice]:
    """Choices with at least these rates, without layers that would keep their whole input."""
    for name in (name for name in choices if rates.get(name, 0) >= 1):
        log.info("%s is not sketched: its noise would be above max_noise", shown(name))
    return {
        name: replace(choice, rate=max(rates.get(name, 0), choice.rate))
        for name, choice in choices.items()
        if rates.get(name, 0) < 1
    }


def _check_max_noise(max_noise: Any, batch: Any, kwargs: Any) -> None:
    number("max_noise", max_noise)  # in variances of SGD itself
    if not isinstance(batch, tuple):
        raise LowtideError(f"batch= takes a tuple of the model's arguments, not a {type(batch).__name__}")
    if not batch and not kwargs:
        raise LowtideError("max_noise= needs a batch to measure on, as in batch=(x,) or kwargs={...}")
