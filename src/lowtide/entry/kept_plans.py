"""How many plans are kept: the oldest goes, unless that would mean to plan the same shapes over and over.

Shapes that come in turn, more of them than are kept, would each find its plan gone. So where one comes back
whose plan was let go, one more is kept from then on: after one turn all of them are there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["KeptPlans"]

Made = TypeVar("Made")


class KeptPlans(OrderedDict[Any, Made]):
    """What was made for each shape, the last used at the end; `say` gets each of two lines once.

    Of what `counts` says no to, nothing was planned yet: it takes no room.
    """

    def __init__(
        self, most: int, say: Callable[[str], None], counts: Callable[[Made], bool] = lambda made: True
    ) -> None:
        super().__init__()
        self.asked = self.most = most
        self.say = say
        self.counts = counts
        self.gone: set[int] = set()

    def make_room(self, key: Any, *, more: int = 1) -> None:
        """Let the oldest go where there is no room for one more, or for `more` of them."""
        if hash(key) in self.gone:
            self.gone.discard(hash(key))
            self.most += 1
            self.say(
                f"shapes come back whose plans were let go: more than max_plans={self.asked} are kept from "
                "now on, one more for each shape that comes back"
            )
        while sum(map(self.counts, self.values())) + more > self.most:
            self.let_oldest_go()

    def let_oldest_go(self) -> None:
        """Let the one go that was not used for longest."""
        key, made = self.popitem(last=False)
        if self.counts(made):
            self.gone.add(hash(key))
            self.say(
                f"more than {self.asked} shapes were seen: old plans are let go and made again when they "
                "come back; pad the batches to fewer shapes, or raise max_plans="
            )

    def use(self, key: Any) -> Made:
        """What was made for a shape, which is the last used then."""
        self.move_to_end(key)
        return self[key]
