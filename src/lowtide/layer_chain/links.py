"""An `nn.Sequential` cut into links: layers, or groups of layers that no checkpoint may separate.

Found by running the layers one after the other without gradients: a layer that changes its input in place,
or whose output lies in the storage of its input, is tied to the layer before it. The same run tells which
layers draw random numbers and which change their buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch import private_of, storage_key
from ..errors import LowtideError
from .link_bytes import measure_link
from .profile import Link

__all__ = ["find_links", "measure_links", "name_layer"]


def find_links(layers: Sequence[nn.Module], sample: torch.Tensor) -> list[Link]:
    """The layers in groups that a checkpoint may not separate, found by running them without gradients."""
    links: list[Link] = []
    start = value = sample.detach().clone()
    tied = False
    for index, layer in enumerate(layers):
        before, version = value, private_of(value, "version")
        value, link = _look(layer, index, before)
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise LowtideError(f"{name_layer(layers, index)}: its output is a {kind}, not one tensor")
        changed = private_of(before, "version") != version
        if changed and storage_key(before) == storage_key(start):
            raise LowtideError(
                f"{name_layer(layers, index)}: it changes the sample in place, so it could not be "
                "recomputed; use inplace=False there"
            )
        tied = tied or changed or storage_key(value) == storage_key(before)
        links = [*links[:-1], _joined(links[-1], link)] if tied and links else [*links, link]
        tied = storage_key(value) == storage_key(start)
    return links


def _look(layer: nn.Module, index: int, value: torch.Tensor) -> tuple[Any, Link]:
    """The output of a layer, and a link that knows whether it is random and whether it changes buffers."""
    state = _random_state(value.device)
    versions = [(buffer, private_of(buffer, "version")) for buffer in layer.buffers()]
    with torch.no_grad():
        output = layer(value)
    same = all(
        a is b and private_of(a, "version") == v for (a, v), b in zip(versions, layer.buffers(), strict=True)
    )
    return output, Link(
        index,
        index + 1,
        out=0,
        random=not all(map(torch.equal, state, _random_state(value.device))),
        changes_buffers=not same,
    )


def _joined(a: Link, b: Link) -> Link:
    return Link(
        a.start,
        b.end,
        out=0,
        random=a.random or b.random,
        changes_buffers=a.changes_buffers or b.changes_buffers,
    )


def measure_links(layers: Sequence[nn.Module], links: Sequence[Link], sample: torch.Tensor) -> list[Link]:
    """The links with their bytes; a parameter that a later link uses too has its gradient already."""
    held = {storage_key(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    value = sample.detach().requires_grad_(sample.requires_grad)
    found: list[Link] = []
    for link in links:
        own = layers[link.start : link.end]
        fresh = partial(_fresh_gradients, own, layers[link.end :])
        for _ in range(2 if value.device.type == "cuda" else 1):  # libraries take workspaces at first use
            measured, output = measure_link(
                link, own, value, leaf=link.start == 0, last=link is links[-1], held=held, fresh=fresh
            )
        found.append(measured)
        value = output
    return found


def _fresh_gradients(layers: Sequence[nn.Module], later: Sequence[nn.Module]) -> None:
    """Take the gradients of layers away; parameters that later layers use too have one of theirs."""
    used = {id(parameter) for layer in later for parameter in layer.parameters()}
    for parameter in (p for layer in layers for p in layer.parameters() if p.requires_grad):
        parameter.grad = torch.zeros_like(parameter) if id(parameter) in used else None


def name_layer(layers: Sequence[nn.Module], index: int) -> str:
    """A layer as its user knows it."""
    return f"layer {index} ({type(layers[index]).__name__})"


def _random_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
