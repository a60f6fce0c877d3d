"""What torch's compiler raises, as users should see it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._torch import RECAPTURES, leaves_may_be_inside, met_in_capture, private
from ..console.user_frames import own_lines, place, with_lines
from ..errors import CaptureError, GraphBreak, LowtideError
from ..plans.planned_step import Plan
from .nested_encoders import NESTED

__all__ = ["CAPPED_INSIDE", "OnlyPlanned", "clear_errors", "users_error"]

CAPPED_INSIDE = "a model that is capped already cannot be captured again"
"""What torch is given as the reason not to trace a capped call."""


class OnlyPlanned(Exception):  # noqa: N818  # not an error: it ends a capture that must not run
    """Raised through torch's compiler when a plan was all that was wanted."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("planned")
        self.plan = plan


@contextmanager
def clear_errors() -> Iterator[None]:
    """Show Lowtide's own errors as they are, torch's graph breaks as the user's line, the rest in short."""
    try:
        yield
    except private("BackendCompilerFailed") as error:
        inner = error.inner_exception
        if isinstance(inner, LowtideError | OnlyPlanned):
            raise inner.with_traceback(None) from None
        _refuse_for_memory(inner)
        raise CaptureError(_describe_failure(inner)) from error
    except private("RecompileLimit") as error:
        raise CaptureError(
            f"the step was captured again too often for the same shapes, {RECAPTURES} times: something it "
            "reads changes at every call (a Python number or flag, what .item() gives). A tensor in its "
            "place, as a buffer, is captured once; torch's warning above names it"
        ) from error
    except private("DynamoError") as error:
        _refuse_for_memory(error)
        found = GraphBreak(_describe_break(error))
        signs = any(sign in str(error) for sign in _SIGNS_OF_USERS_ERRORS)
        known = NESTED in str(error) or _NO_GENERATOR in str(error)
        found.for_good = known or _without_fake(error) is not None
        found.may_be_users = signs and not found.for_good
        raise found from error
    except Exception as error:
        if isinstance(error, LowtideError) or not met_in_capture(error):
            raise
        _refuse_for_memory(error)
        failed = CaptureError(_describe_failure(error))
        failed.may_be_users = True
        raise failed from error


def _refuse_for_memory(error: BaseException) -> None:
    """Tell the host's own error for what it is, where torch's compiler met it: not as a graph break."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, MemoryError):
        seen = seen.__cause__ or seen.__context__
    if seen is not None:
        raise MemoryError(
            "the host ran out of memory while a step was captured and planned: the graph of a step takes "
            "some, its tensors do not yet. Free some, or raise the limit of this process"
        ) from error


def _without_fake(error: Any) -> str | None:
    """The operator that has a kernel and no fake one, where torch stopped at such; None elsewhere."""
    told = r"(?:no fake impl registered for (?:<CustomOpDef\()?|unsupported operator: )([\w:.]+)"
    found = re.search(told, str(error))
    return None if found is None else found[1]


_NO_GENERATOR = "generator is not supported in refs"
"""What torch says of operators that it traces by Python code of its own (2.13)."""

_SIGNS_OF_USERS_ERRORS = ("Observed exception", "when making fake tensor call", "failed to bind arguments")


def users_error(found: CaptureError) -> CaptureError:
    """What the step itself seems to raise, where torch says it after what it says of its capture."""
    cause = found.__cause__
    said = _users_words(cause)
    if said is None:
        return found
    lines = own_lines(getattr(cause, "real_stack", None) or ())
    told = f"the step itself seems to raise an error: {said}{place(lines)}"
    return with_lines(CaptureError(told), lines)


def _users_words(cause: BaseException | None) -> str | None:
    """The user's error as a call, as in ValueError('an odd one'); None where torch does not tell it."""
    if not isinstance(cause, private("DynamoError")):
        return f"{type(cause).__name__}({_first_line(cause)!r})"
    said = re.search(r"(?:got|raised exception) (\w+\(.*\))", str(cause))
    if said is None:
        said = re.search(r"debug context: (\w+Error) <.*?>: (.*)", str(cause))
        return None if said is None else f"{said[1]}({said[2].replace('immutable_', '')!r})"
    return re.sub(r"\[ConstantVariable\(\w+: (.*?)\)\]", r"\1", said[1])  # as torch 2.11 shows a value


def _describe_failure(error: Any) -> str:
    return f"torch could not capture the step and its backward: {type(error).__name__}: {_first_line(error)}"


def _describe_break(error: Any) -> str:
    stack = list(getattr(error, "real_stack", None) or ())
    shown = (own_lines(stack) or stack)[-1:]  # a model may be made of torch's modules alone
    where = "".join(f"{line.filename}:{line.lineno}: {line.line}" for line in shown) or "an unknown line"
    if CAPPED_INSIDE in str(error):
        return f"{CAPPED_INSIDE} ({where}): a step has one budget. lowtide.uncap one of the two"
    if operator := _without_fake(error):
        return (
            f"the step is not one graph: torch cannot capture {where} ({operator} is an operator without a "
            "fake implementation, which tells the shape of its result without running it). Give it one with "
            "torch.library.register_fake, or move that line out of the captured call."
        )
    return (
        f"the step is not one graph: torch cannot capture {where} ({_reason(error)}). "
        "A byte cap needs the whole step. Move that line out of the captured call, or cap the model with "
        "lowtide.cap(..., allow_breaks=True), which plans the pieces around it."
    )


_WORDS = (
    (
        r"(?i)backwards hooks|Tensor with grad_fn",
        "a backward hook of a module that cannot be captured; lowtide.cap captures full ones of modules that "
        "no checkpoint holds (register_full_backward_hook), and hooks of tensors and parameters",
    ),
    (
        r"HOP: Unsafe side effect",
        "a function that torch traces apart, such as a hook of a tensor, changes something outside of it; a "
        "hook of a parameter may, and what a hook of a tensor returns is captured",
    ),
    (
        r"retain_grad",
        "retain_grad() on a tensor that the step makes; torch.autograd.grad gives its gradient inside of the "
        "step, and of what the step returns it can be asked for outside",
    ),
    (r"functorch", "a transform of torch.func around it; lowtide.uncap the model, or cap the whole function"),
    (r"use_numpy_random_stream", "random numbers of NumPy; draw them with torch, or pass them to the step"),
    (
        r"Tensor\.backward\(\)",
        "a backward inside of the step: return the loss, and call backward on it outside; gradients that "
        "the step itself needs come from torch.autograd.grad",
    ),
    (
        r"Unsupported Tensor\.requires_grad_\(\)",
        "requires_grad_() on an input of the step, which changes the caller's tensor; "
        "x = x.detach().requires_grad_() makes one of the step's own",
    ),
    (
        r"requires_grad_\(\)",
        "requires_grad_() on a tensor that the step makes, as in the hooks that gradient checkpointing "
        "and PEFT hang on embeddings; model.gradient_checkpointing_disable() and "
        "model.disable_input_require_grads() take them away",
    ),
)
"""What torch's first line has, and the reason in words."""

_NO_LEAVES = (
    "requires_grad_() on an input of the step, or on a tensor that the step makes, as in gradient penalties "
    "and in the hooks that gradient checkpointing and PEFT hang on embeddings; torch 2.13 captures those of "
    "the step's own, and model.gradient_checkpointing_disable() and model.disable_input_require_grads() take "
    "such hooks away"
)
"""Where torch captures no `requires_grad_()` that changes anything, and says no more of it than that."""

_PACKED = (
    "packed sequences: their lengths are the graph itself, which would be another for each batch; give the "
    "padded batch to the layer and mask what comes out, or see lowtide.Recurrent"
)


def _reason(error: Any) -> str:
    """Why torch stopped, where its first line is advice for its own developers, in words."""
    said, whole = _first_line(error), str(error)
    if NESTED in whole:
        return NESTED
    if "pack_padded_sequence" in whole or "lstm_data" in whole or "pack_sequence" in whole:
        return _PACKED
    if "data-dependent" in said.lower():
        return (
            "data-dependent branching: a plan is made before the values of tensors are known. What `if` asks "
            "of the flags and whole numbers of a batch is followed, before anything writes to them"
        )
    if "Unsupported Tensor.requires_grad_()" in said and not leaves_may_be_inside():
        return _NO_LEAVES
    if _stopped_at_a_generator(said, whole):
        return (
            "a random generator that the step makes, or draws from in a part that torch traces apart, as a "
            "checkpoint; make it before, keep it where the step finds it, and draw outside of such parts "
            "(torch 2.11 can capture none but its default one)"
        )
    if _NO_GENERATOR in whole:
        return (
            "an operator that torch cannot trace with a random generator of its own; draw from torch's "
            "default one, or pass the numbers"
        )
    if "RNN, GRU, or LSTM" in said:
        return f"{said}; lowtide.Recurrent caps such a layer"
    if "marked as skipped" in said and (function := re.search(r"the function `([^`]*)`", whole)):
        return f"{function[1]} is a function that torch does not look into"
    return next((words for sign, words in _WORDS if re.search(sign, said)), said)


def _stopped_at_a_generator(said: str, whole: str) -> bool:
    """Whether a step makes a generator (torch 2.11 knows no such call), or hands one on where none may go."""
    made = "Generator.__new__" in whole
    return made or bool(re.search("args/kwargs to proxy|opaque object", said) and "Generator" in whole)


def _first_line(error: Any) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
