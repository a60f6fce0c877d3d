"""One capture of a model for several budgets: torch traces it once, and Lowtide does all the rest each time.

Most of a first capped call is torch's own work, which knows nothing of budgets: Dynamo reads the model's
code, AOTAutograd traces the joint graph. Inside of `one_capture` both happen once for a model; the next
`cap` or `verify` of it gets copies of what they made. What Lowtide does with them (the stages from `Captured`
to `Runner`), AOTAutograd's second half and every run are each budget's own. Where Dynamo's guards say that a
call is not like the first one, it is captured anew.
"""

import copy
import dataclasses
from contextlib import contextmanager

from torch import fx
from torch._functorch import aot_autograd
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.pipeline import compiled_calls

PLACE = "aot_stage1_graph_capture"
"""Where AOTAutograd traces the joint graph, in torch 2.11-2.13."""

LOOK = "run_functionalized_fw_and_collect_metadata"
"""Where it looks at the forward before: which outputs are views, what is written to."""


@contextmanager
def one_capture():
    """For one model: the budgets that it is capped to share what torch captured."""
    shared = _Shared()
    with (
        _in_place_of(compiled_calls, "compiled", shared.compile),
        _in_place_of(aot_autograd, LOOK, shared.look),
        _in_place_of(aot_autograd, PLACE, shared.trace),
    ):
        yield shared


@contextmanager
def _in_place_of(owner, name, function):
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: function(real, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, real)


class _Shared:
    """`captures` counts what torch really captured: graphs of Dynamo's, and joint graphs of AOTAutograd's."""

    def __init__(self):
        self.step = None  # the model, compiled with the backend below
        self.present = None  # the backend of the budget that is asked for now
        self.traced = {}  # of the Dynamo graph that is asked for now: its metadata and its joint graph
        self.captures = {"dynamo": 0, "joint": 0}

    def compile(self, real, function, backend, **options):
        self.present = backend
        if self.step is None:
            self.step = real(function, self.backend, **options)
        return self.step

    def backend(self, module, inputs):
        """Stands between Dynamo and the backends of the budgets."""
        self.captures["dynamo"] += 1
        kept, traced, runners = _copy(module), {}, {}
        self.traced = traced
        try:
            runners[self.present] = self.present(module, inputs)
        except Exception as error:  # a budget that is refused, say: the capture stays for the next one
            runners[self.present] = _raising(error)

        def call(*args):
            if self.present not in runners:
                self.traced = traced
                runners.clear()
                with _disable_current_modes():
                    runners[self.present] = self.present(_copy(kept), list(args))
            return runners[self.present](*args)

        return call

    def look(self, real, function, **options):
        """The metadata of the forward."""

        def metadata(*args):
            if "metadata" not in self.traced:
                self.traced["metadata"] = real(function, **options)(*args)
            return copy.copy(self.traced["metadata"])

        return metadata

    def trace(self, real, state, function):
        """AOTAutograd's first half; its second half changes some of what the first one made."""
        if "joint" not in self.traced:
            self.captures["joint"] += 1
            found = real(state, function)
            self.traced["joint"] = _copied(found), copy.copy(state)
        found, then = self.traced["joint"]
        state.flat_args, state.flat_args_descs = then.flat_args, then.flat_args_descs
        state.fw_metadata = copy.copy(then.fw_metadata)
        return _copied(found)


def _raising(error):
    def call(*args):
        raise error

    return call


def _copied(found):
    wrappers = [copy.copy(wrapper) for wrapper in found.wrappers]
    return dataclasses.replace(found, graph_module=_copy(found.graph_module), wrappers=wrappers)


def _copy(module):
    """The module with a graph of its own; tensors and modules inside of it are the same."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node, copied in zip(module.graph.nodes, graph.nodes, strict=True):
        copied.meta = dict(node.meta)
    graph.set_codegen(module.graph._codegen)
    made = _LazyGraphModule(module, graph)  # which writes its code when somebody runs it
    made.meta = dict(module.meta)
    return made
