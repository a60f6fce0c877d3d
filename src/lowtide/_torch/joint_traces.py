"""What AOTAutograd traced of a module, kept: asked for another pair of halves, it need not trace again.

Before its partitioner, AOTAutograd makes fake inputs, runs the forward once to see what it returns and
changes, and traces forward and backward. That is nine tenths of its seconds, and nothing of it depends on a
plan. (`prepare_aot_module_simplified`, `run_functionalized_fw_and_collect_metadata` and
`aot_dispatch_autograd_graph`, seen in 2.11-2.13.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from ..process_wide import attributes
from .names import private

__all__ = ["JointTrace"]

_INPUTS = "prepare_aot_module_simplified"
_METADATA = "run_functionalized_fw_and_collect_metadata"
_GRAPH = "aot_dispatch_autograd_graph"


class JointTrace:
    """The trace of one module: what is made in it `in_use` for the first time is given out ever after."""

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """AOTAutograd traces the module, or takes what was traced.

        Until the joint graph is there, for what ops compile when they are priced is traced by itself.
        """
        front, stages = private("aot_autograd"), private("aot_stages")
        inputs, metadata, graph = getattr(front, _INPUTS), getattr(front, _METADATA), getattr(stages, _GRAPH)
        looks = count()  # torch looks twice where inputs are made of others
        ours = {
            _INPUTS: lambda *args, **options: self.inputs(lambda: inputs(*args, **options)),
            _METADATA: lambda *args, **options: self.metadata(metadata(*args, **options), next(looks)),
        }
        with ExitStack() as stack:
            stack.enter_context(attributes(front, **ours))
            stack.enter_context(attributes(stages, **{_GRAPH: self.graph(graph, stack.close)}))
            yield

    def inputs(self, make: Callable[[], Any]) -> Any:
        """The fake inputs, in lists of their own: torch changes lists, and no inputs."""
        if _INPUTS not in self.made:
            self.made[_INPUTS] = make()
        return _with_own_lists(self.made[_INPUTS])

    def metadata(self, collect: Callable[..., Any], look: int) -> Callable[..., Any]:
        """What the forward returns and changes, as it is before a pair of halves is told in it."""

        def collected(*args: Any) -> Any:
            if (_METADATA, look) not in self.made:
                self.made[_METADATA, look] = collect(*args)
            return copy.copy(self.made[_METADATA, look])

        return collected

    def graph(self, trace: Callable[..., Any], done: Callable[[], object]) -> Callable[..., Any]:
        """The joint graph, and what tracing it adds to the metadata."""

        def traced(*args: Any, fw_metadata: Any, **options: Any) -> Any:
            if _GRAPH not in self.made:
                before = dict(vars(fw_metadata))
                made = trace(*args, fw_metadata=fw_metadata, **options)
                told = {key: each for key, each in vars(fw_metadata).items() if before.get(key) is not each}
                self.made[_GRAPH] = made, told
            made, told = self.made[_GRAPH]
            vars(fw_metadata).update(told)
            done()
            return _with_own_lists(made)

        return traced


def _with_own_lists(made: Any) -> Any:
    """The same in other lists and tuples."""
    return type(made)(map(_with_own_lists, made)) if type(made) in (list, tuple) else made
