"""The kind of problem that a classifier of transformers solves: it is inferred from the first labels.

The model notes it in its config while it runs: a regression, one label of several, or any number of them. A
capture of that call is not one of the next, which finds it noted, and the step would be planned twice. So it
is noted before, by the model's own rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["settle_problem_type"]


def settle_problem_type(modules: Iterable[torch.nn.Module], labels: Any) -> None:
    """Note the kind of problem in the configs of the models that would note it at their first call."""
    if not isinstance(labels, torch.Tensor):
        return
    for part in (part for module in modules for part in module.modules()):
        config: Any = getattr(part, "config", None)
        if getattr(config, "problem_type", "") is None and _infers(part):
            config.problem_type = _kind(config.num_labels, labels.dtype)


def _infers(part: Any) -> bool:
    """Whether the forward of a model, or the loss that it calls, looks at the kind of problem."""
    written = [inspect.unwrap(type(part).forward)]
    if getattr(part, "loss_type", None) is not None:  # without one, looking at the function makes a warning
        written.append(part.loss_function)
    return any("problem_type" in code.co_names for code in _codes(written))


def _codes(functions: list[Any]) -> list[Any]:
    return [function.__code__ for function in functions if hasattr(function, "__code__")]


def _kind(count: int, dtype: torch.dtype) -> str:
    if count == 1:
        return "regression"
    if dtype in (torch.int64, torch.int32):
        return "single_label_classification"
    return "multi_label_classification"
