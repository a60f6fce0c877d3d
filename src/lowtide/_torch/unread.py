"""What torch writes and measures while it captures, for logs and metrics: left out where nobody reads it.

Each is a few percent of the seconds to a first step. Where its log is on (`TORCH_LOGS`) it is as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ..process_wide import attributes
from .names import private


def calls_unnamed() -> AbstractContextManager[Any]:
    """Leave out of the front end's log in which function of a file each traced call stands.

    For each file the front end takes the whole text apart, of a model's library, too, whether that log is on
    or not (`get_funcname` and the two logs seen in 2.13).
    """
    front_end = private("front_end")
    if any(_is_read(front_end, log) for log in ("trace_call_log", "trace_source_log")):
        return nullcontext()
    return _replaced(front_end, get_funcname=_no_name)


def _is_read(module: Any, log: str) -> bool:
    found = getattr(module, log, None)
    return found is not None and found.isEnabledFor(logging.DEBUG)


def _replaced(module: Any, **functions: Any) -> AbstractContextManager[Any]:
    """Other functions in a module of torch's, those of them that it has."""
    return attributes(module, **{name: f for name, f in functions.items() if hasattr(module, name)})


def _no_name(file: str, line: int) -> None:
    return None


def guards_untimed() -> AbstractContextManager[None]:
    """Leave out how long the guards of a capture take, before which torch flushes the processor's caches.

    (`profile_guard_manager`, seen in 2.13.)
    """
    return _replaced(private("guards_of_front_end"), profile_guard_manager=_no_time)


def _no_time(*asked: Any) -> float:
    return 0.0


def side_effects_untold() -> dict[str, Any]:
    """The setting by which torch writes no stack for each attribute that a step sets (seen in 2.13).

    What the step sets is set all the same.
    """
    told = getattr(private("dynamo_config"), "side_effect_replay_policy", None)
    read = _is_read(private("side_effects"), "side_effects_log") or _structured_trace_is_kept()
    return {} if read or told != "info" else {"side_effect_replay_policy": "silent"}


def _structured_trace_is_kept() -> bool:
    """Whether somebody has that log; torch's own handler of it goes at its first line if it has no folder."""
    return any(map(_keeps, logging.getLogger("torch.__trace").handlers))


def _keeps(handler: Any) -> bool:
    return getattr(handler, "root_dir", handler) is not None or handler.stream is not None


def metrics_without_settings() -> AbstractContextManager[None]:
    """Leave the settings out of torch's metrics of a capture: torch 2.11 cannot write functions as JSON.

    It logs an error at each capture where settings name functions (`_get_dynamo_config_for_logging`, seen in
    2.11-2.13).
    """
    return attributes(private("dynamo_metrics"), _get_dynamo_config_for_logging=_no_settings)


def _no_settings() -> None:
    return None


@contextmanager
def without_graph_texts() -> Iterator[None]:
    """Leave out the text of each graph where nobody keeps torch's structured trace (seen in 2.11-2.13).

    AOTAutograd writes it for that trace whether there is one or not: a 25th of the capture of 3000 ops.
    """
    if _structured_trace_is_kept():
        yield
        return
    written = torch.fx.GraphModule.print_readable

    def readable(self: torch.fx.GraphModule, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        return written(self, print_output, *args, **kwargs) if print_output else ""

    with attributes(torch.fx.GraphModule, print_readable=readable):
        yield
