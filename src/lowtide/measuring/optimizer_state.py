"""What an optimizer holds, kept so that steps can start from it again and again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from .._torch import unhooked
from ..devices.optimizers import state_tensors
from ..devices.per_tensor import innermost

__all__ = ["OptimizerState"]


class OptimizerState:
    """The state and the options of an optimizer as they are now; its parameters are kept elsewhere."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = innermost(optimizer)
        self.kept = {p: copy.deepcopy(state) for p, state in self.optimizer.state.items()}
        self.options = [copy.deepcopy(_options(group)) for group in self.optimizer.param_groups]

    def restore(self) -> None:
        """Be as at first; tensors that were there have their values again."""
        state = self.optimizer.state
        for parameter in [p for p in state if p not in self.kept]:
            del state[parameter]
        for parameter, kept in self.kept.items():
            for name, value in kept.items():
                now = state[parameter].get(name)
                if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor):
                    now.data.copy_(value)
                else:
                    state[parameter][name] = copy.deepcopy(value)
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(copy.deepcopy(options))

    def step(self) -> None:
        """Step as a training loop does, unseen by the user's hooks, and let go of the gradients."""
        with unhooked(self.optimizer):
            type(self.optimizer).step(self.optimizer)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are there now."""
        return state_tensors(self.optimizer)

    def results(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A copy of the state on the host, by names of parameters."""
        return {
            f"states {name}.{key}": value.detach().to("cpu", copy=True)
            if isinstance(value, torch.Tensor)
            else torch.tensor(value)
            for name, parameter in parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor | int | float)
        }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
