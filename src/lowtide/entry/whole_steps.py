"""A cap covers whole steps: what torch hands over in parts, or would not capture at all, is told apart here.

torch.compile runs a function plainly, and mostly without a word, where it is switched off, where a *stance*
says so, or while a model is exported; and it splits a graph at graph breaks, or at the buckets of
DistributedDataParallel.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .._torch import private, stance
from ..console.user_frames import own_lines
from ..errors import CaptureError, GraphBreak

__all__ = ["refuse_lazy", "refuse_part", "refuse_second_part", "refuse_what_is_not_captured"]


def refuse_what_is_not_captured() -> None:
    """Refuse a training call that torch would run without a capture; it is asked at every call."""
    if torch.compiler.is_exporting():
        raise CaptureError("a capped model cannot be exported by torch.export; lowtide.uncap it first")
    if private("dynamo_config").disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise CaptureError(
            "torch.compile is switched off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE or "
            "torch._dynamo.config.disable), and a cap needs it to capture the step. Switch it on, or "
            "lowtide.uncap the model to run it without a cap."
        )


def forced_eager() -> bool:
    """Whether the user has asked torch to run everything plainly, by `torch.compiler.set_stance`."""
    return stance() == "force_eager"


def split_by(module: fx.GraphModule) -> str | None:
    """Why torch handed over a part of a step, in words; None where the graph is whole."""
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    if "DDPOptimizer" in str(reason.reason):
        return (
            "torch.compile splits it at the buckets of DistributedDataParallel "
            "(torch._dynamo.config.optimize_ddp = False lets it be whole)"
        )
    shown = own_lines(list(reason.user_stack)) or list(reason.user_stack)
    where = "".join(f" at {line.filename}:{line.lineno}" for line in shown[-1:])
    said = str(reason.reason).strip().partition("\n")[0]
    return f"torch.compile breaks its graph{where} ({said})"


def refuse_part(module: fx.GraphModule) -> None:
    """Refuse a graph that is not a whole step: it would be planned as if it were alone on the device."""
    reason = split_by(module)
    if reason is not None:
        raise GraphBreak(
            f"the step is not one graph: {reason}. A byte cap needs the whole step; allow_breaks=True plans "
            "the pieces, and leaves what is between them as it is."
        )


def refuse_second_part() -> None:
    """Refuse a second graph of one call, whoever made two of it."""
    raise GraphBreak(
        "the step is not one graph: torch handed over a second one for the same call. A byte cap needs the "
        "whole step; allow_breaks=True plans the pieces, and leaves what is between them as it is."
    )


def refuse_lazy(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse parameters that the first call makes: captured, they are drawn before the step's own numbers."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.modules.lazy.LazyModuleMixin) and _uninitialized(part):
                raise CaptureError(
                    f"{name or type(part).__name__!r} ({type(part).__name__}) has no parameters before its "
                    "first call, and a plan counts them. Run the model once before, as in "
                    "`with torch.no_grad(): model(batch)`, and then make the optimizer and cap it."
                )


def _uninitialized(module: Any) -> bool:
    return bool(module.has_uninitialized_params())
