"""Every private torch name that Lowtide leans on, in one place.

Each line says in which versions the name was seen with the meaning used here. `tests/test_torch_names.py`
fails with a clear message when one is missing, and `missing_names` tells a user the same.
"""

from __future__ import annotations

import dis
import functools
import importlib
import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from .process_wide import Change, Shared, UndoneBy, attributes, here

__all__ = [
    "ATTRIBUTES",
    "NAMES",
    "attributes",
    "missing_names",
    "outside_dynamo",
    "private",
    "private_of",
    "set_private",
    "storage_key",
]

NAMES: dict[str, tuple[str, str]] = {
    # use here: (where it lives, versions it was seen in)
    "aot_module_simplified": ("torch._functorch.aot_autograd:aot_module_simplified", "2.11-2.13"),
    "dynamo_config": ("torch._dynamo.config", "2.11-2.13"),
    "inductor_config": ("torch._inductor.config", "2.11-2.13"),
    "functorch_config": ("torch._functorch.config", "2.11-2.13"),
    "optimize": ("torch._dynamo:optimize", "2.11-2.13"),
    "compile_lock": ("torch._dynamo.convert_frame:compile_lock", "2.11-2.13"),
    "BackendCompilerFailed": ("torch._dynamo.exc:BackendCompilerFailed", "2.11-2.13"),
    "DynamoError": ("torch._dynamo.exc:TorchDynamoException", "2.11-2.13"),
    "RecompileLimit": ("torch._dynamo.exc:FailOnRecompileLimitHit", "2.11-2.13"),
    "FakeTensor": ("torch._subclasses.fake_tensor:FakeTensor", "2.11-2.13"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor:FakeTensorMode", "2.11-2.13"),
    "TorchDispatchMode": ("torch.utils._python_dispatch:TorchDispatchMode", "2.11-2.13"),
    "without_modes": ("torch.utils._python_dispatch:_disable_current_modes", "2.11-2.13"),
    "count_modes": ("torch._C:_len_torch_dispatch_stack", "2.11-2.13"),
    "push_mode": ("torch.utils._python_dispatch:_push_mode", "2.11-2.13"),
    "pop_mode": ("torch.utils._python_dispatch:_pop_mode", "2.11-2.13"),
    "without_autocast": ("torch._C:_DisableAutocast", "2.11-2.13"),
    "enter_autocast": ("torch.amp.autocast_mode:_enter_autocast", "2.11-2.13"),
    "exit_autocast": ("torch.amp.autocast_mode:_exit_autocast", "2.11-2.13"),
    "has_kernel": ("torch._C:_dispatch_has_kernel_for_dispatch_key", "2.11-2.13"),
    "call_module": ("torch.nn.modules.module:Module._call_impl", "2.11-2.13"),
    "Operator": ("torch._ops:OperatorBase", "2.11-2.13"),
    "OpOverload": ("torch._ops:OpOverload", "2.11-2.13"),
    "DispatchKey": ("torch._C:DispatchKey", "2.11-2.13"),
    "tree_map_only": ("torch.utils._pytree:tree_map_only", "2.11-2.13"),
    "tree_leaves": ("torch.utils._pytree:tree_leaves", "2.11-2.13"),
    "tree_flatten": ("torch.utils._pytree:tree_flatten", "2.11-2.13"),
    "tree_unflatten": ("torch.utils._pytree:tree_unflatten", "2.11-2.13"),
    "tree_map": ("torch.utils._pytree:tree_map", "2.11-2.13"),
    "disable_dynamo": ("torch._compile:_disable_dynamo", "2.11-2.13"),
    "run_backward": ("torch.autograd.graph:_engine_run_backward", "2.11-2.13"),
    "keeps_graph": ("torch._C:_autograd._get_current_graph_task_keep_graph", "2.11-2.13"),
    "compile_fx": ("torch._inductor.compile_fx:compile_fx", "2.11-2.13"),
    "compile_fx_inner": ("torch._inductor.compile_fx:compile_fx_inner", "2.11-2.13"),
    "CustomPartitionerFn": ("torch._inductor.custom_graph_pass:CustomPartitionerFn", "2.11-2.13"),
    "inductor_cache": ("torch._inductor.runtime.cache_dir_utils:default_cache_dir", "2.11-2.13"),
    "InductorChoices": ("torch._inductor.choices:InductorChoices", "2.11-2.13"),
    "decide_layout": ("torch._inductor.graph:GraphLowering.decide_layout_opt", "2.11-2.13"),
    "GraphLowering": ("torch._inductor.graph:GraphLowering", "2.11-2.13"),
    "StorageBox": ("torch._inductor.ir:StorageBox", "2.11-2.13"),
    "inductor_now": ("torch._inductor.virtualized:V", "2.11-2.13"),
    "register_lowering": ("torch._inductor.lowering:register_lowering", "2.11-2.13"),
    "inductor_decompositions": ("torch._inductor.decomposition:select_decomp_table", "2.11-2.13"),
    "fx_graph_cse": ("torch._functorch.compile_utils:fx_graph_cse", "2.11-2.13"),
    "engine_will_run": ("torch._C:_will_engine_execute_node", "2.11-2.13"),
    "guards": ("torch._C:_dynamo.guards", "2.11-2.13"),
    "TracingContext": ("torch._guards:TracingContext", "2.11-2.13"),
    "Tracer": ("torch._dynamo.symbolic_convert:InstructionTranslator", "2.11-2.13"),
    "leave_pool": ("torch._C:_cuda_endAllocateToPool", "2.11-2.13"),
    "graph_task": ("torch._C:_current_graph_task_id", "2.11-2.13"),
    "active_ddp": ("torch.nn.parallel:DistributedDataParallel._get_active_ddp_module", "2.11-2.13"),
    "eval_frame": ("torch._dynamo.eval_frame", "2.11-2.13"),
    "functorch_level": ("torch._C:_functorch.peek_interpreter_stack", "2.11-2.13"),
    "saving_hooks_allowed": ("torch._C:_autograd._saved_tensors_hooks_is_enabled", "2.11-2.13"),
    "neg_view": ("torch:_neg_view", "2.11-2.13"),
    "suggest_memory_format": ("torch._prims_common:suggest_memory_format", "2.11-2.13"),
    "default_store": ("torch.distributed.distributed_c10d:_get_default_store", "2.13"),
    "process_group": ("torch.distributed.distributed_c10d:_resolve_process_group", "2.13"),
    "gather_from_ranks": (
        "torch.distributed._functional_collectives:all_gather_tensor_autograd",
        "2.13",
    ),
    "FakeStore": ("torch.testing._internal.distributed.fake_pg:FakeStore", "2.13"),
    "below_autograd": ("torch._C:_AutoDispatchBelowAutograd", "2.11-2.13"),
    "wait_tensor": ("torch:ops._c10d_functional.wait_tensor.default", "2.11-2.13"),
    "storage_holders": ("torch._C:_storage_Use_Count", "2.13"),
    "without_torch_function": ("torch._C:DisableTorchFunctionSubclass", "2.11-2.13"),
    "wrapper_tensor": ("torch:Tensor._make_wrapper_subclass", "2.11-2.13"),
    "saving_hooks": ("torch._C:_autograd._top_saved_tensors_default_hooks", "2.11-2.13"),
    "AnyTracer": ("torch._dynamo.symbolic_convert:InstructionTranslatorBase", "2.11-2.13"),
    "TracedTensor": ("torch._dynamo.variables:TensorVariable", "2.11-2.13"),
    "TracedConstant": ("torch._dynamo.variables:ConstantVariable", "2.11-2.13"),
    "fake_kernels": ("torch._subclasses.fake_impls:op_implementations_dict", "2.13"),
    "grouped_product_result": ("torch._meta_registrations:_create_grouped_mm_output_tensor", "2.13"),
    "NotYetTraced": ("torch._dynamo.variables:LazyVariableTracker", "2.11-2.13"),
}

ATTRIBUTES: dict[str, tuple[str, str, str]] = {
    # use here: (attribute, the class whose instances have it, versions it was seen in)
    "storage_key": ("_cdata", "torch:UntypedStorage", "2.11-2.13"),
    "version": ("_version", "torch:Tensor", "2.11-2.13"),
    "backward_hooks": ("_backward_hooks", "torch:Tensor", "2.11-2.13"),
    "accumulated_hooks": ("_post_accumulate_grad_hooks", "torch:Tensor", "2.11-2.13"),
    "sequence_number": ("_sequence_nr", "torch.autograd.graph:Node", "2.11-2.13"),
    "compiled_call": ("_compiled_call_impl", "torch.nn:Module", "2.11-2.13"),
    "buffers": ("_buffers", "torch.nn:Module", "2.11-2.13"),
    "parameters": ("_parameters", "torch.nn:Module", "2.11-2.13"),
    "modules": ("_modules", "torch.nn:Module", "2.11-2.13"),
    "forward_hooks": ("_forward_hooks", "torch.nn:Module", "2.11-2.13"),
    "forward_pre_hooks": ("_forward_pre_hooks", "torch.nn:Module", "2.11-2.13"),
    "pre_hooks_with_kwargs": ("_forward_pre_hooks_with_kwargs", "torch.nn:Module", "2.11-2.13"),
    "flat_weights": ("_flat_weights", "torch.nn:LSTM", "2.11-2.13"),
    "flat_weights_names": ("_flat_weights_names", "torch.nn:LSTM", "2.11-2.13"),
    "schema": ("_schema", "torch._ops:OpOverload", "2.11-2.13"),
    "kernel": ("_op", "torch._ops:OpOverload", "2.11-2.13"),
    "compiled_from": ("_torchdynamo_orig_callable", "the function that torch.compile returns", "2.11-2.13"),
    "fsdp_state": ("_get_fsdp_state", "torch.distributed.fsdp:FSDPModule", "2.11-2.13"),
    "fsdp_groups": ("_fsdp_param_groups", "the state of an FSDPModule", "2.13"),
    "fsdp_group": ("_fsdp_param_group", "the state of an FSDPModule", "2.11-2.13"),
    "fsdp_modules": ("_modules", "the state of an FSDPModule", "2.11-2.13"),
    "fsdp_precision": ("_mp_policy", "the state of an FSDPModule", "2.11-2.13"),
    "fsdp_frees_as_root": ("_auto_reshard_after_forward", "the state of an FSDPModule", "2.11-2.13"),
    "fsdp_ahead_in_forward": ("_states_to_forward_prefetch", "the state of an FSDPModule", "2.11-2.13"),
    "fsdp_ahead_in_backward": ("_states_to_backward_prefetch", "the state of an FSDPModule", "2.11-2.13"),
    "fsdp_size": ("_orig_size", "a parameter of FSDP", "2.11-2.13"),
    "fsdp_stride": ("_contiguous_orig_stride", "a parameter of FSDP", "2.11-2.13"),
    "fsdp_place": ("_module_info", "a parameter of FSDP", "2.11-2.13"),
    "fsdp_whole": ("_unsharded_param", "a parameter of FSDP", "2.11-2.13"),
    "compiled_module": ("_orig_mod", "the module that torch.compile returns", "2.11-2.13"),
}
"""Private attributes of torch's objects; `private_of` reads one and `set_private` sets it."""

_MISSING = object()


def private_of(owner: Any, name: str, default: Any = _MISSING) -> Any:
    """The private attribute of a torch object behind a name of `ATTRIBUTES`.

    A default stands for what an object of another class does not have.
    """
    attribute = ATTRIBUTES[name][0]
    return getattr(owner, attribute) if default is _MISSING else getattr(owner, attribute, default)


def set_private(owner: Any, name: str, value: Any) -> None:
    """Set the private attribute of a torch object behind a name of `ATTRIBUTES`."""
    setattr(owner, ATTRIBUTES[name][0], value)


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages that are alive apart."""
    return int(tensor.untyped_storage()._cdata)


def inner_tensors(item: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """The plain tensors of a tensor by the attributes that lead to them: of a DTensor, its local one.

    AOTAutograd takes apart by the same protocol what is made of others (`__tensor_flatten__`, 2.11-2.13).
    """
    if not isinstance(item, torch.Tensor):
        return {}
    if not is_made_of_others(item):
        return {(): item}
    return {
        (name, *rest): tensor
        for name in item.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        for rest, tensor in inner_tensors(getattr(item, name)).items()
    }


def is_made_of_others(item: Any) -> bool:
    """Whether a tensor is of a subclass that wraps other tensors, as DTensor does."""
    plain = type(item) in (torch.Tensor, torch.nn.Parameter) or not isinstance(item, torch.Tensor)
    return not plain and hasattr(item, "__tensor_flatten__")


def place_of(node: Any) -> tuple[int, tuple[str, ...]] | None:
    """Which input of a captured step a placeholder stands for, and the attributes that lead to it there.

    None for what torch adds, and where it merged some (the descriptors of `meta["desc"]`, seen in 2.11-2.13).
    """
    path: list[str] = []
    described = node.meta.get("desc")
    while hasattr(described, "base") and hasattr(described, "attr"):
        path.insert(0, described.attr)
        described = described.base
    return (described.idx, tuple(path)) if type(described).__name__ == "PlainAOTInput" else None


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor, and its storage: Python, autograd, threads of torch's own.

    By `Tensor._use_count`, seen in 2.13.
    """
    count = getattr(tensor, "_use_count", None)
    return 0 if count is None else count(), private("storage_holders")(storage_key(tensor))


def find(place: str) -> Any:
    """The object at "module:attribute.path"; raises AttributeError or ImportError where there is none."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


F = TypeVar("F", bound=Callable[..., Any])


def outside_dynamo(function: F, reason: str | None = None) -> F:
    """A function at which torch.compile breaks its graph, instead of compiling what it does.

    The reason is what torch says where it may not break (`_torchdynamo_disable_msg`, seen in 2.11-2.13).
    """
    outside = private("disable_dynamo")(function)
    if reason is not None:
        outside._torchdynamo_disable, outside._torchdynamo_disable_msg = True, reason
    return outside  # type: ignore[no-any-return]


@functools.cache  # some are asked for at every step, and one for every gradient
def private(name: str) -> Any:
    """The private torch object behind a name of `NAMES`."""
    place, versions = NAMES[name]
    try:
        return find(place)
    except (AttributeError, ImportError) as error:
        raise ImportError(
            f"torch {torch.__version__} has no {place}, which Lowtide needs; "
            f"it was seen in torch {versions}. Install a torch of those versions or a newer Lowtide."
        ) from error


def missing_names() -> list[str]:
    """The private names that this torch does not have."""
    return [name for name in NAMES if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        private(name)
    except ImportError:
        return False
    return True


def in_backward() -> bool:
    """Whether a backward is going on in this thread; while a step is traced, none is."""
    return not torch.compiler.is_compiling() and private("graph_task")() != -1


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def present_trace() -> int | None:
    """A number for the trace of torch.compile that is being made, None outside of one.

    None as well inside of a part that is traced by itself, as a checkpointed one is: what is traced there
    must not be remembered outside (`current_tracer.parent` seen in 2.11-2.13).
    """
    if private("TracingContext").try_get() is None:
        return None
    tracer = private("Tracer").current_tx().output.current_tracer
    return None if tracer.parent is not None else id(tracer)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def writes_traced() -> int:
    """How often tensors were written to in place in the present trace (`example_value` seen in 2.11-2.13)."""
    nodes = private("Tracer").current_tx().output.current_tracer.graph.nodes
    values = [node.meta.get("example_value") for node in nodes]
    return sum(value._version for value in values if isinstance(value, torch.Tensor))


Answer = Callable[[str, Any], bool | None]
"""Which way a branch goes, of the module whose code branches and the node of the tensor; None: unknown."""


Look = Callable[[Any], None]
"""What sees, and may change, each call of a trace before it is tried on fake tensors."""


class _Looks(threading.local):
    """What this thread has to say to torch's front end while that captures for it."""

    answer: Answer | None = None
    present: Look | None = None


_looks = _Looks()


class branches_answered(Change):  # noqa: N801  # reads as a verb where it is used
    """Let a function say which way a branch on a tensor goes where torch.compile, which cannot look, stops.

    The front end has a function for each of Python's instructions (`dispatch_table`, seen in 2.11-2.13).
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def make(self) -> None:
        """Put other tables in the place of the front end's; a class may have that of the one above it."""
        _let_answer()
        self.undone_by(functools.partial(setattr, _looks, "answer", _looks.answer))
        _looks.answer = self.answer
        for tracer, table in _tables(self.answer):
            self.undone_by(functools.partial(setattr, tracer, "dispatch_table", tracer.dispatch_table))
            tracer.dispatch_table = table


@functools.cache
def _let_answer() -> None:
    """Ask the present thread's function, if it has one, where a flag is brought to Python.

    All of `bool(x)`, `int(x)` and `x.item()` come to `TensorVariable.method_item` (seen in 2.13). Numbers
    other than flags stay symbols: each of their values would be another step.
    """
    traced = private("TracedTensor")
    item = traced.method_item

    def method_item(self: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        answer = _looks.answer
        if answer is not None and self.dtype == torch.bool and tracer.output.current_tracer.parent is None:
            said = answer(str(tracer.f_globals.get("__name__")), self.as_proxy().node)
            if said is not None:
                return private("TracedConstant").create(said)
        return item(self, tracer, *args, **kwargs)

    traced.method_item = method_item


def calls_looked_at(look: Look) -> AbstractContextManager[Any]:
    """Let a function see each call that this thread traces with torch.compile's front end."""
    _let_look()
    return here(_looks, present=look)


@functools.cache
def _let_look() -> None:
    """Ask the present thread's function, if it has one, where the front end tries a call.

    Once and for good, so that threads do not undo each other's (`get_fake_value`, seen in 2.13).
    """
    builder = importlib.import_module("torch._dynamo.variables.builder")
    tried = builder.get_fake_value

    def try_call(node: Any, tracer: Any, *args: Any, **kwargs: Any) -> Any:
        look = _looks.present
        whole = tracer.output.current_tracer.parent is None  # not a part that is traced by itself
        if look is not None and whole and node.op in ("call_function", "call_method"):
            look(node)
        return tried(node, tracer, *args, **kwargs)

    builder.get_fake_value = try_call  # type: ignore[attr-defined]


@functools.cache
def _tables(answer: Answer) -> list[tuple[Any, list[Any]]]:
    """For each class of tracers the functions of its instructions, with branches that ask first."""
    found, tracers = [], [private("AnyTracer")]
    for tracer in tracers:
        tracers += tracer.__subclasses__()
        table = list(tracer.dispatch_table)
        for name, code in dis.opmap.items():
            if re.fullmatch(r"(POP_)?JUMP(_FORWARD|_BACKWARD)?_IF_(TRUE|FALSE)(_OR_POP)?", name):
                table[code] = _asking(table[code], name, answer)
        table[dis.opmap["STORE_ATTR"]] = _leaving_leaves(table[dis.opmap["STORE_ATTR"]])
        table[dis.opmap["UNARY_NOT"]] = _denying(table[dis.opmap["UNARY_NOT"]], answer)
        found.append((tracer, table))
    return found


def _leaving_leaves(store: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The instruction that sets an attribute; `requires_grad = True` of what the step makes is left out.

    Models set it for checkpointing, so that a segment has an input with a gradient. Nobody outside gets hold
    of that gradient, and all others are what they are without it.
    """

    def handle(tracer: Any, instruction: Any) -> None:
        value, owner = tracer.stack[-2:]
        made = isinstance(owner, private("TracedTensor")) and owner.as_proxy().node.op != "placeholder"
        if instruction.argval != "requires_grad" or not made or not _is_true(value):
            store(tracer, instruction)
        else:
            tracer.popn(2)

    return handle


def _is_true(value: Any) -> bool:
    return isinstance(value, private("TracedConstant")) and value.as_python_constant() is True


def _denying(deny: Callable[[Any, Any], None], answer: Answer) -> Callable[[Any, Any], None]:
    """The instruction of `not`, with an answer in the place of a tensor."""

    def handle(tracer: Any, instruction: Any) -> None:
        node = _branched_on(tracer)
        said = None if node is None else answer(str(tracer.f_globals.get("__name__")), node)
        if said is None:
            deny(tracer, instruction)
        else:
            tracer.pop()
            tracer.push(private("TracedConstant").create(not said))

    return handle


def _asking(jump: Callable[[Any, Any], None], name: str, answer: Answer) -> Callable[[Any, Any], None]:
    """The instruction of a jump, with an answer in the place of a tensor that it depends on."""

    def handle(tracer: Any, instruction: Any) -> None:
        node = _branched_on(tracer)
        said = None if node is None else answer(str(tracer.f_globals.get("__name__")), node)
        if said is None:
            jump(tracer, instruction)
        elif not name.endswith("_OR_POP"):
            tracer.pop()
            tracer.push(private("TracedConstant").create(said))
            jump(tracer, instruction)
        elif said is ("_TRUE_" in name):  # of `a or b` and `a and b` the tensor itself is what comes out
            tracer.jump(instruction)
        else:
            tracer.pop()

    return handle


def _branched_on(tracer: Any) -> Any:
    """The node of the tensor that the next jump, or `not`, depends on; None for what is none."""
    value = tracer.stack[-1]
    if isinstance(value, private("NotYetTraced")):
        tensor = value.is_realized() or isinstance(value.peek_value(), torch.Tensor)
        value = value.realize() if tensor else value
    if not isinstance(value, private("TracedTensor")) or tracer.output.current_tracer.parent is not None:
        return None
    return value.as_proxy().node


def traced_input(node: Any) -> Any:
    """What a placeholder of a trace stands for in the call that is traced (`grapharg`, seen in 2.11-2.13)."""
    argument = node.meta.get("grapharg")
    return None if argument is None else argument.example


def traced_value(node: Any) -> Any:
    """The fake value of a node of a trace (`example_value`, seen in 2.11-2.13)."""
    return node.meta.get("example_value")


def met_in_capture(error: Exception) -> bool:
    """Whether torch.compile met an error while it captured, not while the step ran.

    It marks those, of whatever class (`innermost_user_frame_summary`, seen in 2.11-2.13).
    """
    return hasattr(error, "innermost_user_frame_summary")


def autocast_knows(operator: str, kind: str) -> bool:
    """Whether autocast has a rule for an operator on a kind of device: what it calls is then not cast."""
    try:
        return bool(private("has_kernel")(f"aten::{operator}", f"Autocast{kind.upper()}"))
    except RuntimeError:  # there is no operator of that name
        return False


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one (`_is_view`, seen in 2.11-2.13)."""
    return tensor._is_view()


def first_run_unwatched() -> AbstractContextManager[None]:
    """Let AOTAutograd put no dispatch mode on in a first run: calls of kernels are not cast there.

    By it torch checks what custom operators alias (`check_custom_op_aliasing`, seen in 2.11-2.13).
    """
    return attributes(private("functorch_config"), check_custom_op_aliasing=False)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its arguments as one list and empties it (seen in 2.11-2.13)."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


RECAPTURES = 64
"""How often a step may be captured for the same shapes, where it reads Python values that change; chosen."""


def capture_settings(*, recurrent: bool = False) -> AbstractContextManager[None]:
    """How torch.compile's front end looks at a step that it captures (names seen in 2.11-2.13).

    Sizes are numbers: no symbols stand for them. Hooks on modules are watched, so that one added later is not
    missed; a step that reads changing Python values may be captured more than a few times; what it writes to
    a log, or warns of, is left out. Numbers that it draws with NumPy are NumPy's: torch would draw them from
    its own generator. The buckets of DistributedDataParallel do not split the graph; where torch would give
    up and run plainly, it raises.
    It looks into `nn.LSTM` and its kin where they are `recurrent` layers that can be captured as they run.
    Not by `config.patch`, which leaves a context variable behind for good.
    """
    config = private("dynamo_config")
    return attributes(
        config,
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        skip_nnmodule_hook_guards=False,
        recompile_limit=RECAPTURES,
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
        **({"optimize_ddp": False} if in_process_group() else {}),
        use_numpy_random_stream=True,
        allow_rnn=recurrent,
        ignore_logging_functions=config.ignore_logging_functions or _log_functions(),
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


Around = Callable[[], AbstractContextManager[Any]]


def compiled(
    function: Callable[..., Any], backend: Callable[..., Any], *, fullgraph: bool, around: Around
) -> Callable[..., Any]:
    """What `torch.compile` makes of a function; a block is around each capture, and around no other call.

    By the callback of torch's front end, which calls it with a frame that is new to it (`callback` and
    `_torchdynamo_orig_backend`, by which it finds the backend, seen in 2.11-2.13). Without `dynamic=False`,
    which writes settings at every call: they belong into the block.
    """
    context = private("optimize")(backend=backend, nopython=fullgraph)
    context.callback = _Around(context.callback, around)
    return context(function)  # type: ignore[no-any-return]


class _Around:
    """The front end's callback within a block; one thread at a time, as the front end has it."""

    def __init__(self, callback: Callable[..., Any], around: Around) -> None:
        self._torchdynamo_orig_backend = callback
        self.around = around

    def __call__(self, *frame: Any) -> Any:
        with private("compile_lock"), self.around():
            return self._torchdynamo_orig_backend(*frame)


def in_process_group() -> bool:
    """Whether this process is one of several that train together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def stance() -> str:
    """What `torch.compiler.set_stance` says, "default" unless it was called (`_stance` seen in 2.11-2.13)."""
    return private("eval_frame")._stance.stance  # type: ignore[no-any-return]


def _set_usual_stance(undone_by: UndoneBy) -> None:
    module = private("eval_frame")
    asked = module._stance
    if asked.stance in ("default", "fail_on_recompile") and asked.backend is None:
        return
    undone_by(functools.partial(setattr, module, "_stance", asked))
    module._stance = module.DynamoStance()


usual_stance = Shared(_set_usual_stance)
"""A block in which torch.compile captures at once, whatever stance compiled functions of others wait in.

Of those that it sets aside "eager_then_compile" would run a first step without a plan. Not so
"fail_on_recompile", which raises (`_stance` and `DynamoStance` seen in 2.11-2.13).
"""


_LOG_NAMES = ("debug", "info", "warn", "warning", "error", "exception", "critical", "fatal", "log")


def _log_functions() -> set[Any]:
    """What writes to a log, or warns; libraries add functions of their own, as `Logger.warning_once`."""
    methods = (f for name, f in vars(logging.Logger).items() if name.partition("_")[0] in _LOG_NAMES)
    return _Unlisted([*methods, warnings.warn])


class _Unlisted(set[Any]):
    """A set that lists one of its members: torch 2.11 would sort them for its metrics, and cannot.

    Methods of loggers are looked up, and a function, as `warnings.warn`, is looked for in the list.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter((warnings.warn,))


def count_global_hooks() -> int:
    """How many hooks are on all modules (`_global_forward_hooks` and its kin, seen in 2.11-2.13)."""
    return sum(map(len, _global_hooks()))


@functools.cache
def _global_hooks() -> list[Any]:
    module = importlib.import_module("torch.nn.modules.module")
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return [getattr(module, f"_global_{kind}") for kind in kinds]


class eager_kernels(Change):  # noqa: N801  # reads as a noun where it is used
    """Trace resizing ops and recurrent layers as the kernels that eager runs (`py_kernels`, in 2.11-2.13).

    For these torch keeps Python decompositions that only tracing uses: a dozen ops in place of one kernel,
    slower without a fusing compiler, rounded differently, and with other masks of dropout between layers.
    """

    def make(self) -> None:
        """Take these decompositions away."""
        for op in _replaced_in_traces():
            self.undone_by(functools.partial(_give_kernels, op, dict(op.py_kernels)))
            for key in (private("DispatchKey").Autograd, private("DispatchKey").CompositeImplicitAutograd):
                op.py_kernels.pop(key, None)
            op._dispatch_cache.clear()


def _give_kernels(op: Any, kernels: dict[Any, Any]) -> None:
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()


@contextmanager
def without_graph_texts() -> Iterator[None]:
    """Leave out the text of each graph where nobody keeps torch's structured trace (seen in 2.11-2.13).

    AOTAutograd writes it for that trace whether there is one or not: a 25th of the capture of 3000 ops.
    """
    if logging.getLogger("torch.__trace").handlers:
        yield
        return
    written = torch.fx.GraphModule.print_readable

    def readable(self: torch.fx.GraphModule, print_output: bool = True, *args: Any, **kwargs: Any) -> str:
        return written(self, print_output, *args, **kwargs) if print_output else ""

    with attributes(torch.fx.GraphModule, print_readable=readable):
        yield


def keeping_draws() -> AbstractContextManager[None]:
    """Let torch's passes over captured graphs keep random ops that nobody reads.

    They erase these unless numbers are to be eager's (`fallback_random`, seen in 2.11-2.13).
    """
    return attributes(private("inductor_config"), fallback_random=True)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@functools.cache
def _replaced_in_traces() -> list[Any]:
    packets = [
        getattr(torch.ops.aten, name)
        for name in dir(torch.ops.aten)
        if "upsample" in name or name in _RECURRENT
    ]
    found = [packet for packet in packets if hasattr(packet, "overloads")]
    return [getattr(packet, overload) for packet in found for overload in packet.overloads()]


def is_optimizer_hook(name: str) -> bool:
    """Whether an attribute of an optimizer has its hooks (`_optimizer_step_pre_hooks`, seen in 2.11-2.13)."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def without_optimizer_hooks() -> AbstractContextManager[None]:
    """Step an optimizer unseen by hooks on all of them (`_global_optimizer_pre_hooks`, seen in 2.11-2.13).

    Where there are some, optimizers of other threads are unseen meanwhile, too.
    """
    module = sys.modules["torch.optim.optimizer"]
    some = _unseen.holders or any(getattr(module, name) for name in _GLOBAL_HOOKS)
    return _unseen() if some else nullcontext()


def _take_global_hooks(undone_by: UndoneBy) -> None:
    module = sys.modules["torch.optim.optimizer"]
    for name in _GLOBAL_HOOKS:
        if present := getattr(module, name):
            undone_by(functools.partial(setattr, module, name, present))
            setattr(module, name, {})


_unseen = Shared(_take_global_hooks)


def unhooked(optimizer: Any) -> AbstractContextManager[None]:
    """Step an optimizer unseen by hooks on it (`_optimizer_step_pre_hooks`, seen in 2.11-2.13)."""
    return attributes(optimizer, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})


def changes_gradients(optimizer: Any) -> bool:
    """Whether hooks run before the steps of an optimizer (`_optimizer_step_pre_hooks`, seen in 2.11-2.13)."""
    return bool(getattr(optimizer, "_optimizer_step_pre_hooks", None))


def steps_as_its_class(optimizer: Any) -> bool:
    """Whether `step` is the class's own, or one that torch's schedulers count (`_wrapped_by_lr_sched`).

    Seen in 2.11-2.13.
    """
    own = vars(optimizer).get("step")
    return own is None or hasattr(own, "_wrapped_by_lr_sched")


def frees_tangents() -> bool:
    """Whether autograd lets go of the incoming gradients of a node while it runs (new in 2.13)."""
    return hasattr(torch.autograd.Function, "boxed_grads_call")


def generated_code(look: Callable[[str], None]) -> AbstractContextManager[None]:
    """Show the text of each graph that Inductor compiles, or has in its cache, before its kernels are loaded.

    By `GraphLowering.save_output_code`, seen in 2.11-2.13.
    """
    lowering = private("GraphLowering")
    before = lowering.save_output_code

    def save(text: str) -> None:
        if before is not None:
            before(text)
        look(text)

    return attributes(lowering, save_output_code=staticmethod(save))


def realized_where_asked() -> AbstractContextManager[None]:
    """Let Inductor realize no value on the CPU just because two nodes read it: the plan says which.

    It does so with exponentials, and with what is made of more than four values. A GPU's kernel keeps such a
    value to itself; the loops of the CPU's often differ in order, and then it is a buffer as large as
    an activation (`StorageBox.should_realize_on_reuse`, seen in 2.11-2.13).
    """
    box = private("StorageBox")
    before = box.should_realize_on_reuse

    def should_realize(value: Any, *args: Any, **facts: Any) -> bool:
        device = value.get_device()
        on_cpu = device is not None and device.type == "cpu"
        return not on_cpu and bool(before(value, *args, **facts))

    return attributes(box, should_realize_on_reuse=should_realize)


def generated_modules() -> list[Any]:
    """The code that Inductor generated and loaded so far (`PyCodeCache.modules`, seen in 2.11-2.13).

    That list is emptied with the caches; the modules keep their place among Python's own.
    """
    cache = sys.modules.get("torch._inductor.codecache")
    listed = [] if cache is None else cache.PyCodeCache.modules
    home = "torch._inductor.runtime.compile_tasks."
    return [*listed, *(module for name, module in list(sys.modules.items()) if name.startswith(home))]


def scheduler_pass() -> Any:
    """The class of passes over Inductor's nodes: new in 2.12, plain callables before."""
    module = importlib.import_module("torch._inductor.custom_graph_pass")
    return getattr(module, "CustomSchedulerPass", object)
