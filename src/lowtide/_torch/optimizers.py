"""Optimizers: their hooks, and whose `step` is called."""

from __future__ import annotations

import functools
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..process_wide import Shared, UndoneBy, attributes


def is_optimizer_hook(name: str) -> bool:
    """Whether an attribute of an optimizer has its hooks (`_optimizer_step_pre_hooks`, seen in 2.11-2.13)."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def without_optimizer_hooks() -> AbstractContextManager[None]:
    """Step an optimizer unseen by hooks on all of them (`_global_optimizer_pre_hooks`, seen in 2.11-2.13).

    Where there are some, optimizers of other threads are unseen meanwhile, too.
    """
    module = sys.modules["torch.optim.optimizer"]
    some = _unseen.holders or any(getattr(module, name) for name in _GLOBAL_HOOKS)
    return _unseen() if some else nullcontext()


def _take_global_hooks(undone_by: UndoneBy) -> None:
    module = sys.modules["torch.optim.optimizer"]
    for name in _GLOBAL_HOOKS:
        if present := getattr(module, name):
            undone_by(functools.partial(setattr, module, name, present))
            setattr(module, name, {})


_unseen = Shared(_take_global_hooks)


def unhooked(optimizer: Any) -> AbstractContextManager[None]:
    """Step an optimizer unseen by hooks on it (`_optimizer_step_pre_hooks`, seen in 2.11-2.13)."""
    return attributes(optimizer, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})


def changes_gradients(optimizer: Any) -> bool:
    """Whether hooks run before the steps of an optimizer (`_optimizer_step_pre_hooks`, seen in 2.11-2.13)."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def steps_as_its_class(optimizer: Any) -> bool:
    """Whether `step` is the class's own, or one that torch's schedulers count (`_wrapped_by_lr_sched`).

    Seen in 2.11-2.13.
    """
    own = vars(optimizer).get("step")
    return own is None or hasattr(own, "_wrapped_by_lr_sched")
