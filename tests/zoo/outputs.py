"""Models that return something other than one scalar, or are called with keywords."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Built, case, labels
from .dense import BATCH, WIDTH, layers


class Backbone(nn.Module):
    """Eight layers and two heads; the cases below differ in `wrap`, which forms what is returned."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*layers(act=nn.GELU))
        self.left = nn.Linear(WIDTH, 8)
        self.right = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return self.wrap(x, self.left(x), self.right(x))


def inputs() -> tuple[Tensor]:
    return (torch.randn(BATCH, WIDTH),)


class OneTensor(Backbone):
    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left, right], dim=1)


@case()
def returns_tensor() -> Built:
    return OneTensor(), inputs(), {}


class Dict(Backbone):
    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"left": left, "right": right.softmax(-1), "hidden": x}


@case("multi_output", "dict")
def returns_dict() -> Built:
    return Dict(), inputs(), {}


class Partly(Backbone):
    """Some outputs take no gradient: detached, integer, boolean, none, a plain number."""

    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> tuple:
        return left, x.detach().mean(0), right.argmax(-1), right > 0, right, None, 3


@case("multi_output")
def returns_partly_differentiable() -> Built:
    return Partly(), inputs(), {}


@dataclass
class Prediction:
    left: Tensor
    right: Tensor
    note: str = ""


class Dataclass(Backbone):
    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> Prediction:
        return Prediction(left=left.tanh(), right=right)


@case("multi_output", "dataclass")
def returns_dataclass() -> Built:
    return Dataclass(), inputs(), {}


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Nested(Backbone):
    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> dict[str, Any]:
        return {"pair": Pair(left, right), "list": [x.sum(), (x.mean(1),)]}


@case("multi_output", "dict")
def returns_nested() -> Built:
    return Nested(), inputs(), {}


class Views(Backbone):
    """Two outputs see the same storage, the others are slices."""

    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> tuple:
        return x.view(-1, 4, WIDTH // 4), x, left[:, 2:6], right[::2]


@case("multi_output", "views")
def returns_views() -> Built:
    return Views(), inputs(), {}


class Transposed(Backbone):
    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> tuple:
        return x.transpose(0, 1), left.t(), right.t()


@case("multi_output", "views", "aot_rounds")
def returns_transposed() -> Built:
    """Eager carries the transposed strides of the gradients on; the traced graph asks for packed ones."""
    return Transposed(), inputs(), {}


class Chunks(Backbone):
    def wrap(self, x: Tensor, left: Tensor, right: Tensor) -> tuple:
        return tuple(left.chunk(2, dim=1)) + tuple(right.unbind(1))


@case("multi_output", "views")
def returns_chunks() -> Built:
    return Chunks(), inputs(), {}


class Same(Backbone):
    """The same tensor twice, and the input itself."""

    def forward(self, x: Tensor) -> tuple:
        y = self.left(self.body(x)) + self.right(self.body(x)).repeat(1, 2)
        return y, y, x, x.view(-1)


@case("multi_output", "views")
def returns_same_and_input() -> Built:
    return Same(), inputs(), {}


class Activations(Backbone):
    """Every layer's output is returned, so none of them may go."""

    def forward(self, x: Tensor) -> tuple:
        hidden = []
        for layer in self.body:
            x = layer(x)
            hidden.append(x)
        return self.left(x), self.right(x), hidden


@case("multi_output")
def returns_every_activation() -> Built:
    return Activations(), inputs(), {}


class Weighted(Backbone):
    """Keywords only: tensors, a number, a flag, and a mask left at its default."""

    def forward(self, *, x: Tensor, target: Tensor, scale=1.0, mask: Tensor | None = None, smooth=False):
        x = self.body(x)
        loss = functional.cross_entropy(
            self.left(x), target, reduction="none", label_smoothing=0.1 if smooth else 0.0
        )
        loss = loss if mask is None else loss * mask
        return scale * (loss.mean() + self.right(x).square().mean())


@case("loss_inside", "kwargs")
def keywords() -> Built:
    kwargs = {
        "x": torch.randn(BATCH, WIDTH),
        "target": labels(BATCH, classes=8),
        "scale": 0.5,
        "smooth": True,
    }
    return Weighted(), (), kwargs


class Batch(Backbone):
    """One dictionary holding a list and a tuple."""

    def forward(self, batch: dict[str, Any], *, weights: tuple[Tensor, Tensor]) -> Tensor:
        x = sum(batch["parts"])
        loss = functional.cross_entropy(self.left(self.body(x)), batch["target"]) * weights[0]
        return loss + weights[1] * self.right(x).square().mean()


@case("loss_inside", "kwargs")
def nested_inputs() -> Built:
    parts = [torch.randn(BATCH, WIDTH) for _ in range(2)]
    batch = {"parts": parts, "target": labels(BATCH, classes=8)}
    return Batch(), (batch,), {"weights": (torch.tensor(1.0), torch.tensor(0.1))}
