"""What a case of the zoo is, and the few parts the cases share.

Tags that a test may rely on, each true of exactly the cases that carry it:

- `loss_inside`: the output is a scalar loss, or has one under the name `loss`;
- `random`: a step draws from torch's generator (`dropout` says by which kind of layer);
- `mutates`: a step changes a buffer;
- `mutates_input`: a step changes one of its arguments;
- `frozen`: some parameters get no gradient;
- `aot_rounds`: on the CPU the traced graph itself differs from eager in the last bits (an op is
  decomposed, or has other strides), so the exact reference is `backend="aot_eager_default_partitioner"`;
- `mincut_wrong`: torch's min-cut partitioner gives wrong gradients, because it computes again from a tensor
  that was written to since; `aot_eager` and `inductor` are no reference here;
- `races`: with more than one thread two eager steps already differ, unless torch is told to be deterministic.

The other tags describe a case (`conv`, `sdpa`, `tied`, `views`, ...) and serve to select some.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple, dict]
ZOO: dict[str, "Case"] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model with one batch; `make` gives the same of both whenever it is called."""

    name: str
    make: Callable[[], Built]
    tags: frozenset[str]


def case(*tags: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Put the decorated builder into the zoo under its own name."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        def make() -> Built:
            torch.manual_seed(0)
            model, args, kwargs = build()
            return model.train(), args, kwargs

        name = build.__name__
        assert name not in ZOO, f"two cases are named {name}"
        ZOO[name] = Case(name, make, frozenset(tags))
        return build

    return register


class Supervised(nn.Module):
    """A network with its loss, called as `model(x, target)`."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.net(x), target)


class Residual(nn.Module):
    """`x + f(x)`."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def labels(*shape: int, classes: int) -> Tensor:
    return torch.randint(classes, shape)


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor of an output, through tuples, lists, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors(tuple(output.values()))
    elif dataclasses.is_dataclass(output):
        yield from tensors(tuple(vars(output).values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from tensors(item)


def scalar(output: Any) -> Tensor:
    """The loss to call `backward` on: the model's own if it has one, else one over all its outputs."""
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    if getattr(output, "loss", None) is not None:
        return output.loss
    needing = [t for t in tensors(output) if t.requires_grad]
    return sum((t * t).mean() * (i + 1) for i, t in enumerate(needing))
