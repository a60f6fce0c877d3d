"""A walk through the house: which rooms `lowtide.cap` and one step enter, in which order, and how often.

    PYTHONPATH=src python benchmarks/walk.py
    PYTHONPATH=src python benchmarks/walk.py --executor inductor --files

`sys.setprofile` sees every call. A room is entered when one of its functions is called from another room;
calls within a room do not count, nor do look-ups that a room makes in one below it. On the way down the
pipeline goes into each room once: the path is printed as it was walked, with the functions it went by.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide

ROOT = Path(lowtide.__file__).parent
GUIDES = ("entry", "pipeline")
"""The rooms that lead from one room to the next; all others only look things up in those below them."""


@dataclass
class Walk:
    """What was entered: files, and the rooms that the guides went into, with the functions they called."""

    files: set[str] = field(default_factory=set)
    path: list[tuple[str, str]] = field(default_factory=list)

    def way_down(self) -> list[str]:
        """The rooms from the joint graph, which torch hands over, to the functions of the step.

        A room counts as often as it is entered from another one; `plans` is data, which all rooms hold,
        and `console` only tells how long each stage took.
        """
        names = [name for _, name in self.path]
        start, end = names.index("through_aot") + 1, names.index("checked") + 1
        found: list[str] = []
        for room, _ in self.path[start:end]:
            if room not in ("plans", "console") and found[-1:] != [room]:
                found.append(room)
        return found


def _place(filename: str) -> str | None:
    """A file of Lowtide by its path in the package."""
    path = Path(filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


def _room(place: str) -> str:
    return place.split("/")[0] if "/" in place else "top"


@contextmanager
def walking(walk: Walk):
    """Follow all calls of this thread."""
    known: dict[str, str | None] = {}

    def place_of(frame: Any) -> str | None:
        name = frame.f_code.co_filename
        if name not in known:
            known[name] = _place(name)
        return known[name]

    def caller(frame: Any) -> str | None:
        """The nearest file of Lowtide above a frame; torch may be in between."""
        while (frame := frame.f_back) is not None:
            if (found := place_of(frame)) is not None:
                return found
        return None

    def look(frame: Any, event: str, _: Any) -> None:
        if event != "call" or (place := place_of(frame)) is None:
            return
        walk.files.add(place)
        above = caller(frame)
        if above is None or _room(above) not in GUIDES or _room(place) in ("top", _room(above)):
            return
        name = frame.f_code.co_name
        if not name.startswith("<") and (not walk.path or walk.path[-1] != (_room(place), name)):
            walk.path.append((_room(place), name))

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk_of(step: Callable[[], None]) -> Walk:
    """What a step walks through."""
    walk = Walk()
    with walking(walk):
        step()
    return walk


def capped_step(executor: str) -> Callable[[], None]:
    """`cap` and one training step of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(256, 64)

    def step() -> None:
        lowtide.cap(model, "60%", executor=executor, prices="roofline")
        model(x).square().mean().backward()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executor", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--files", action="store_true", help="list the files as well")
    args = parser.parse_args()
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    lowtide.cap  # noqa: B018  # imports are no part of the walk
    walk = walk_of(capped_step(args.executor))
    print(f"{len(walk.files)} files in {len({_room(place) for place in walk.files})} rooms")
    if args.executor == "eager":
        print("the way down:", " > ".join(walk.way_down()))
    last = ""
    for room, function in walk.path:
        print(f"{room if room != last else '':12} {function}")
        last = room
    if args.files:
        print("\n".join(sorted(walk.files)))


if __name__ == "__main__":
    main()
