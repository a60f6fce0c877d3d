"""Where ranks meet while a step is planned: short messages through the store of the process group.

No collective is used. A rank that does not come makes the others raise after the time that was given to
`init_process_group`, one that fails tells them why, and nothing is sent through a GPU's memory.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from .._torch import in_process_group, private
from ..errors import RanksDiffer

__all__ = ["Meeting", "all_failed", "tell_failure"]

_SHORTEST, _LONGEST = 0.002, 0.25
"""Seconds between two looks at the store: the first, and the longest; chosen."""


def tell_failure(attempt: str, error: BaseException) -> None:
    """Let ranks that wait for this one know that it will not come."""
    if attempt and in_process_group() and torch.distributed.get_backend() != "fake":
        said = str(error).partition("\n")[0]
        me = torch.distributed.get_rank()
        _store().set(_failure(attempt, me), f"{type(error).__name__}: {said}")


def all_failed(attempt: str) -> bool:
    """Whether all ranks failed at an attempt, so that they may do together what they would not do alone.

    A step with collectives that only some run would never end.
    """
    store = _store()
    end = time.monotonic() + store.timeout.total_seconds()
    for rank in range(torch.distributed.get_world_size()):
        while not (failed := store.check([_failure(attempt, rank)])) and time.monotonic() < end:
            if store.check([_arrival(attempt, rank)]):
                break
            time.sleep(_LONGEST / 10)
        # One that arrived fails as well, when it hears of others that did not come.
        if not failed or store.check([_arrival(attempt, rank)]):
            return False
    return True


@dataclass
class Meeting:
    """Some ranks that plan the same step; `attempt` names it and counts its plans, the same on each."""

    ranks: tuple[int, ...]
    attempt: str
    store: Any = field(default_factory=lambda: _store())
    me: int = field(default_factory=lambda: torch.distributed.get_rank())

    def __post_init__(self) -> None:
        self.store.set(_arrival(self.attempt, self.me), "")

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides."""
        return self.me == self.ranks[0]

    def to_first(self, message: Any) -> list[Any]:
        """What every rank says, in their order, on the first one; nothing on the others."""
        stage = self.next_stage()
        if not self.leads:
            self.store.set(self.key(stage, self.me), json.dumps(message))
            return []
        heard = [message]
        for rank in self.ranks[1:]:
            heard.append(self.hear(self.key(stage, rank)))
            with suppress(RuntimeError):  # not every kind of store forgets
                self.store.delete_key(self.key(stage, rank))
        return heard

    def from_first(self, message: Any = None) -> Any:
        """What the first rank says, on every rank."""
        key = self.key(self.next_stage(), self.ranks[0])
        if self.leads:
            self.store.set(key, json.dumps(message))
            return message
        return self.hear(key)

    def hear(self, key: str) -> Any:
        """The message under a key, as soon as it is there."""
        limit, pause = self.store.timeout, _SHORTEST
        end = time.monotonic() + limit.total_seconds()
        while not self.store.check([key]):
            self.refuse_failed()
            if time.monotonic() > end:
                raise self.missing(key, limit)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return json.loads(self.store.get(key))

    def refuse_failed(self) -> None:
        """Raise where one of the others has failed."""
        for rank in self.ranks:
            if rank != self.me and self.store.check([_failure(self.attempt, rank)]):
                said = self.store.get(_failure(self.attempt, rank)).decode()
                raise RanksDiffer(
                    f"rank {rank} failed while the ranks {shown(self.ranks)} planned the same step, so this "
                    f"one (rank {self.me}) cannot go on: {said}"
                )

    def missing(self, key: str, limit: timedelta) -> RanksDiffer:
        """The error for a rank that did not come."""
        rank = key.rpartition("/")[2]
        return RanksDiffer(
            f"rank {rank} did not come to plan this step with rank {self.me} within {limit}: its call has "
            "other shapes, which it has a plan for, or it is not in this call at all. A step with "
            "collectives is planned by all of its ranks together: call it on each with the same shapes"
        )

    def next_stage(self) -> int:
        _stages[self.attempt] += 1
        return _stages[self.attempt]

    def key(self, stage: int, rank: int) -> str:
        return f"lowtide/{self.attempt}/{self.ranks[0]}+{len(self.ranks)}/{stage}/{rank}"


_stages: Counter[str] = Counter()


def shown(ranks: Sequence[int]) -> str:
    """Ranks in words, as in "0 to 7"."""
    whole = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if whole else " and ".join(map(str, ranks))


def _failure(attempt: str, rank: int) -> str:
    return f"lowtide/{attempt}/failed/{rank}"


def _arrival(attempt: str, rank: int) -> str:
    return f"lowtide/{attempt}/arrived/{rank}"


def _store() -> Any:
    return private("default_store")()
