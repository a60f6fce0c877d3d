"""The best checkpoints of an `nn.Sequential`, chosen by measuring it, and run.

The method of Hong et al. (2025), see `lowtide.solve.chain`, with the law of `chain_profile`: every layer is
measured once by itself, the checkpoints with the least peak follow, and the segments between them run under
`torch.utils.checkpoint(use_reentrant=False)`. The last segment runs plainly: its backward comes first.

The promise: outputs, gradients, buffers and random state are bitwise those of the plain Sequential, and the
measured peak is the predicted one, to the byte on the CPU, for layers whose operators take no hidden
workspace. A random layer adds the saved state of the generator to its segment, a few KiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .._torch import private_of, storage_key
from ..arguments import all_of
from ..errors import BudgetTooSmall, LowtideError, NothingToTrain
from ..measuring.trial import Trial
from ..solve.chain.search import long_end, quadratic, swept_peak, walk
from ..units import Budget, format_bytes, parse_budget, refuse_device_share
from .link_bytes import run_layers, storage_bytes
from .links import find_links, measure_links, name_layer
from .profile import ChainLaw, Link

__all__ = ["CheckpointedChain", "Segment", "checkpoint_chain"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Layers `start` to `end` - 1, and whether they are recomputed in the backward."""

    start: int
    end: int
    again: bool
    random: bool = False
    changes_buffers: bool = False


class CheckpointedChain(nn.Sequential):
    """A Sequential of the same layers that keeps what its segments say; made by `checkpoint_chain`.

    `segments` are what it runs, `peak` is the predicted peak of a step in bytes: parameters, buffers, the
    sample, the output, all activations and all gradients; `plain_peak` is that of the plain Sequential.

    >>> import lowtide, torch
    >>> layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    >>> lowtide.checkpoint_chain(layers, torch.randn(100, 64), keep=[2]).indices
    (0, 2, 4)
    """

    segments: tuple[Segment, ...] = ()
    peak: int = 0
    plain_peak: int = 0

    @property
    def indices(self) -> tuple[int, ...]:
        """What is kept: 0 is the sample, k the output of layer k - 1."""
        return (0, *(segment.end for segment in self.segments))

    def extra_repr(self) -> str:
        kept = ", ".join(map(str, self.indices))
        return f"keeps {kept}; peak {format_bytes(self.peak)}, plainly {format_bytes(self.plain_peak)}"

    def forward(self, value: Any) -> Any:
        """The output of the layers."""
        layers = list(self)
        for segment in self.segments:
            if segment.again and torch.is_grad_enabled():
                value = _checkpointed(segment, layers[segment.start : segment.end], value)
                continue
            for layer in layers[segment.start : segment.end]:
                value = layer(value)
        return value


def checkpoint_chain(
    model: nn.Sequential,
    sample: torch.Tensor,
    *,
    budget: int | str | Budget | None = None,
    keep: Sequence[int] | None = None,
) -> CheckpointedChain:
    """A Sequential of the same layers with the least peak, measured on a sample of the real batch's shape.

    The layers, parameters and state_dict keys are those of `model`, which stays usable. With a `budget` (a
    share is one of the plain peak) less is recomputed. `keep` names the kept outputs by hand: 0 is the
    sample, k the output of layer k - 1.

    >>> import lowtide, torch
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(16)))
    >>> chain = lowtide.checkpoint_chain(model, torch.randn(1000, 64))
    >>> chain.peak < chain.plain_peak / 2
    True
    """
    _check_model(model, sample)
    trial = Trial(model, (sample,), {}, None)
    try:
        profile = _Profile.of(model, sample)
    finally:
        trial.restore()
    chain = CheckpointedChain()
    for name, layer in private_of(model, "modules").items():
        chain.add_module(name, layer)
    chain.training = model.training
    kept = profile.best(budget) if keep is None else profile.vertices(keep)
    chain.segments = profile.segments(kept)
    chain.peak = profile.peak(kept)
    chain.plain_peak = profile.peak((0, len(profile.law.links)))
    return chain


def _check_model(model: Any, sample: Any) -> None:
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise LowtideError(
            f"checkpoint_chain takes an nn.Sequential, not {type(model).__name__}; for any other model use "
            "lowtide.cap(model, budget)"
        )
    if not len(model):
        raise LowtideError("the Sequential is empty; checkpoint_chain needs at least one layer")
    if not isinstance(sample, torch.Tensor):
        raise LowtideError(f"sample is a {type(sample).__name__}; a Sequential takes one tensor")
    for name, parameter in model.named_parameters():
        if private_of(parameter, "accumulated_hooks", None):
            raise LowtideError(
                f"{name} has a hook that runs when its gradient is there (an optimizer in the backward?), "
                "and measuring would call it; call checkpoint_chain before the hook is registered"
            )


@dataclass(frozen=True)
class _Profile:
    """A measured Sequential: links that need no gradient, the law of the others, and what is there anyway."""

    frozen: tuple[Link, ...]
    law: ChainLaw
    resident: int
    sample: int

    @classmethod
    def of(cls, model: nn.Sequential, sample: torch.Tensor) -> _Profile:
        layers = list(model)
        links = measure_links(layers, find_links(layers, sample), sample)
        split = next((k for k, link in enumerate(links) if link.backward), len(links))
        if split == len(links):
            raise NothingToTrain("no layer of the Sequential needs a gradient: is every parameter frozen?")
        stuck = next((link for link in links[split:] if not link.backward), None)
        if stuck:
            where = name_layer(layers, stuck.end - 1)
            raise LowtideError(f"{where}: its output needs no gradient, but its input does")
        tensors = {storage_key(t): t for t in [*model.parameters(), *model.buffers()]}
        first = links[split - 1].out if split else storage_bytes(sample)
        return cls(
            frozen=tuple(links[:split]),
            law=ChainLaw(tuple(links[split:]), first, first_held=split == 0),
            resident=sum(map(storage_bytes, tensors.values())),
            sample=storage_bytes(sample),
        )

    def peak(self, kept: Sequence[int]) -> int:
        """The predicted peak in bytes of keeping these outputs."""
        base = self.resident + (self.sample if self.frozen else 0)
        before = [0, *(link.out for link in self.frozen[:-1])]
        running = [a + link.forward for a, link in zip(before, self.frozen, strict=False)]
        return base + max([swept_peak(self.law.sizes, kept, self.law), *running])

    def best(self, budget: int | str | Budget | None) -> tuple[int, ...]:
        """The kept outputs with the least recomputation, for the least peak or under a budget."""
        least = quadratic(self.law.sizes, self.law)
        bound = least[0] if budget is None else self._bound(parse_budget(budget), least[0])
        close = walk(self.law.sizes, least, bound, self.law)
        # Neither is always the better one: near checkpoints make short segments, a long end is not recomputed
        # at all.
        return min(close, long_end(self.law.sizes, self.law, bound), key=self._rerun)

    def _bound(self, budget: Budget, least: int) -> int:
        refuse_device_share(budget, "checkpoint_chain")
        if budget.word == "min":
            return least
        plain = self.peak((0, len(self.law.links)))
        total = budget.bytes if budget.share is None else budget.part(plain)
        if total is None:
            raise LowtideError(f"budget {budget} is not bytes; write a number, a share like '60%' or 'min'")
        base = self.resident + (self.sample if self.frozen else 0)
        if total < base + least:
            raise BudgetTooSmall(
                f"budget {budget} is below {format_bytes(base + least)}, the least peak of checkpoints here "
                f"(plainly {format_bytes(plain)}); lowtide.cap may go lower",
                budget=total,
                smallest=base + least,
            )
        return total - base

    def _rerun(self, kept: Sequence[int]) -> int:
        segments = [s for s in self.segments(kept) if s.again]
        return sum(link.out for s in segments for link in self.law.links if s.start <= link.start < s.end)

    def segments(self, kept: Sequence[int]) -> tuple[Segment, ...]:
        """The segments in layers, the frozen ones first."""
        found = [Segment(link.start, link.end, again=False) for link in self.frozen]
        for i, j in pairwise(kept):
            links = self.law.links[i:j]
            found.append(
                Segment(
                    links[0].start,
                    links[-1].end,
                    again=j < kept[-1] and not (len(links) == 1 and links[0].keeps_only_input),
                    random=any(link.random for link in links),
                    changes_buffers=any(link.changes_buffers for link in links),
                )
            )
        return tuple(found)

    def vertices(self, keep: Sequence[int]) -> tuple[int, ...]:
        """Kept outputs by layers as those of the law."""
        all_of("keep", keep, int, "the places of kept outputs, as in keep=[0, 4]")
        possible = [self.law.links[0].start, *(link.end for link in self.law.links)]
        wrong = [k for k in keep if k not in possible and k != 0]
        if wrong:
            raise LowtideError(f"keep names {wrong[0]}, where nothing can be kept; possible are {possible}")
        return tuple(k for k, layer in enumerate(possible) if k in (0, len(possible) - 1) or layer in keep)


def _checkpointed(segment: Segment, layers: Sequence[nn.Module], value: Any) -> Any:
    """The output of a segment that will be recomputed; what it does to buffers, it does once."""
    ran = False

    def run(value: Any) -> Any:
        nonlocal ran
        # torch.utils.checkpoint calls this twice: the second time is the recomputation.
        again, ran = ran, True
        return run_layers(layers, value, recomputed=again and segment.changes_buffers)

    return checkpoint(run, value, use_reentrant=False, preserve_rng_state=segment.random)
