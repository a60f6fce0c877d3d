"""How a step is captured: settings of torch's front end, of AOTAutograd and of Inductor's passes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..process_wide import attributes
from .names import private
from .unread import side_effects_untold


def first_run_unwatched() -> AbstractContextManager[None]:
    """Let AOTAutograd put no dispatch mode on in a first run: calls of kernels are not cast there.

    By it torch checks what custom operators alias (`check_custom_op_aliasing`, seen in 2.11-2.13).
    """
    return attributes(private("functorch_config"), check_custom_op_aliasing=False)


def telling_of_a_capture() -> AbstractContextManager[None]:
    """Say that something is compiled, as torch's front end does while it calls a backend.

    A trace that is made at another time, for another plan, would else look like one of a user's to the calls
    of other threads: torch refuses these then (`_is_compiling_flag`, seen in 2.11-2.13).
    """
    return attributes(torch.compiler, _is_compiling_flag=True)


RECAPTURES = 64
"""How often a step may be captured for the same shapes, where it reads Python values that change; chosen."""


def capture_settings(*, recurrent: bool = False) -> AbstractContextManager[None]:
    """How torch.compile's front end looks at a step that it captures (names seen in 2.11-2.13).

    Sizes are numbers, and no symbols stand for them but where they are marked so (`sizes_marked`). Hooks on
    modules are watched, so that one added later is not missed; a step that reads changing Python values may
    be captured more than a few times; what it writes to a log, or warns of, is left out. Numbers that it
    draws with NumPy are NumPy's: torch would draw them from its own generator. The buckets of
    DistributedDataParallel do not split the graph; where torch would give up and run plainly, it raises.
    Gradients that the step itself asks for (`torch.autograd.grad`) are traced. Parameters are looked at in
    each call where torch passes over those of unchanged modules, by default in 2.11: it misses unfrozen ones.
    It looks into `nn.LSTM` and its kin where they are `recurrent` layers that can be captured as they run.
    Not by `config.patch`, which leaves a context variable behind for good.
    """
    config = private("dynamo_config")
    return attributes(
        config,
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        specialize_int=True,
        specialize_float=True,
        skip_nnmodule_hook_guards=False,
        recompile_limit=RECAPTURES,
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
        **({"optimize_ddp": False} if in_process_group() else {}),
        skip_tensor_guards_with_matching_dict_tags=not config.use_recursive_dict_tags_for_guards,
        use_numpy_random_stream=True,
        allow_rnn=recurrent,
        **({"trace_autograd_ops": True} if hasattr(config, "trace_autograd_ops") else {}),  # seen in 2.13
        ignore_logging_functions=config.ignore_logging_functions or _log_functions(),
        **side_effects_untold(),
    )


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put back torch's settings where an interrupt keeps torch from doing so (seen in 2.11-2.13)."""
    configs = [private(name) for name in ("dynamo_config", "functorch_config", "inductor_config")]
    before = [config.get_config_copy() for config in configs]
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            for config, kept in zip(configs, before, strict=True):
                _give_settings(config, kept)
        raise


def _give_settings(config: Any, kept: dict[str, Any]) -> None:
    for name, value in config.get_config_copy().items():
        before = kept[name]  # what is neither a number nor a text nor None has no equal copy
        if isinstance(before, bool | int | float | str | None) and value != before:
            setattr(config, name, before)


def in_process_group() -> bool:
    """Whether this process is one of several that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


_LOG_NAMES = ("debug", "info", "warn", "warning", "error", "exception", "critical", "fatal", "log")


def _log_functions() -> set[Any]:
    """What writes to a log, or warns; libraries add functions of their own, as `Logger.warning_once`."""
    methods = (f for name, f in vars(logging.Logger).items() if name.partition("_")[0] in _LOG_NAMES)
    return _Unlisted([*methods, warnings.warn])


class _Unlisted(set[Any]):
    """A set that lists one of its members: torch compares each callable of a step with all that are listed.

    Methods of loggers are looked up, and a function, as `warnings.warn`, is looked for in the list.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter((warnings.warn,))


def code_on_demand() -> AbstractContextManager[None]:
    """Let graphs have their Python code written when they are called, if ever, as in torch's own captures.

    AOTAutograd walks through most of its graphs, and the code of one takes as long as a copy of it
    (`_use_lazy_graph_module_flag`, seen in 2.11-2.13).
    """
    return attributes(private("lazy_graphs"), _use_lazy_graph_module_flag=True)


def module_of(root: torch.nn.Module, graph: torch.fx.Graph) -> torch.fx.GraphModule:
    """A graph as a module whose code is written when it is called (`_make_graph_module`, in 2.11-2.13)."""
    with code_on_demand():
        made: torch.fx.GraphModule = private("lazy_graphs")._make_graph_module(root, graph)
    return made


def keeping_draws() -> AbstractContextManager[None]:
    """Let torch's passes over captured graphs keep random ops that nobody reads.

    They erase these unless numbers are to be eager's (`fallback_random`, seen in 2.11-2.13).
    """
    return attributes(private("inductor_config"), fallback_random=True)
