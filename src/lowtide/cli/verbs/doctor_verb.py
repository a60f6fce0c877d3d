"""`lowtide doctor`: what works here."""

from __future__ import annotations

import argparse
import logging

from ...console.progress import waiting
from ..doctor import examine
from . import Answer

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> Answer:
    """Look at everything; the answer holds if nothing that is needed is broken."""
    logging.disable(logging.ERROR)  # the small step that is capped on the way is no news
    try:
        with waiting("looking at versions, devices, compilers and a small capped step"):
            found = examine()
    finally:
        logging.disable(logging.NOTSET)
    return Answer(found.to_json() if chosen.json else str(found), found.ok)
