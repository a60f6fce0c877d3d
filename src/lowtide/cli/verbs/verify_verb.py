"""`lowtide verify`: the step run with and without a cap, compared bit by bit."""

from __future__ import annotations

import argparse
from typing import Any

from ...console.progress import waiting
from ...entry.user_step import UserStep, found_step, make_step, users_code
from ...errors import LowtideError
from ...evidence.verification import Verification, verify
from ...measuring.trial import modules_of
from ...plans import json_format
from . import Answer

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Verify the step; the answer holds if everything was equal and the peak was kept."""
    with waiting(f"verifying {chosen.step}"), found_step(chosen.step) as function:
        step = make_step(function, chosen.batch_size)
        _check_runs(step)
        options = {"method": chosen.method} | ({"executor": chosen.executor} if chosen.executor else {})
        options |= {"split": chosen.split} if chosen.split else {}
        with users_code("the step could not be run"):
            found = verify(step.model, *step.batch, budget=chosen.budget, kwargs=step.kwargs, **options)
    return Answer(json_format.dump(_plain(found)) if chosen.json else str(found), found.ok)


def _check_runs(step: UserStep) -> None:
    tensors = [tensor for _, module in modules_of(step.model) for tensor in module.parameters()]
    if any(tensor.is_meta for tensor in tensors):
        raise LowtideError(
            "verify runs the step, but its model is on the meta device; make it on a device that is here, "
            "or use `lowtide plan`, which runs nothing"
        )


def _plain(found: Verification) -> dict[str, Any]:
    return {
        "lowtide": "verification",
        "version": 1,
        "ok": found.ok,
        "budget": found.plan.budget,
        "predicted": found.predicted,
        "measured": found.measured,
        "uncapped": found.uncapped._asdict(),
        "capped": found.capped._asdict(),
        "compared": found.compared,
        "different": list(found.different),
        "different_uncapped": list(found.different_uncapped),
        "unstable": list(found.unstable),
        "far": list(found.far),
        "compiled": found.compiled,
        "rounding": None if found.rounding is None else found.rounding._asdict(),
    }
