"""`lowtide demo`: a small language model trained uncapped and capped."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..demo import demonstrate
from . import Answer

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Run the demonstration, which prints as it goes."""
    return Answer("", demonstrate(steps=chosen.steps, share=chosen.share, out=Path(chosen.out)))
