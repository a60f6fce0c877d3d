"""`lowtide batch`: the largest batch that fits a budget, uncapped and capped."""

from __future__ import annotations

import argparse

from ...batch_size.batches import largest_batch
from ...console.progress import waiting
from ...entry.user_step import found_step
from . import Answer

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Look for the largest batch and show what was found."""
    with waiting(f"importing {chosen.step}") as say, found_step(chosen.step) as function:
        found = largest_batch(
            function,
            chosen.budget,
            device=chosen.device,
            executor=chosen.executor or "eager",
            method=chosen.method,
            optimizer=chosen.optimizer,
            most=chosen.most,
            progress=say,
        )
    return Answer(found.to_json() if chosen.json else str(found))
