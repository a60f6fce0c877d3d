"""The table: every private name and attribute of torch, with the versions it was seen in.

`tests/test_torch_names.py` fails with a clear message when one is missing, and `missing_names` tells a user
the same.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

NAMES: dict[str, tuple[str, str]] = {
    # use here: (where it lives, versions it was seen in)
    "aot_module_simplified": ("torch._functorch.aot_autograd:aot_module_simplified", "2.11-2.13"),
    "aot_autograd": ("torch._functorch.aot_autograd", "2.11-2.13"),
    "aot_stages": ("torch._functorch._aot_autograd.graph_compile", "2.11-2.13"),
    "dynamo_config": ("torch._dynamo.config", "2.11-2.13"),
    "dynamo_metrics": ("torch._dynamo.utils", "2.11-2.13"),
    "inductor_config": ("torch._inductor.config", "2.11-2.13"),
    "functorch_config": ("torch._functorch.config", "2.11-2.13"),
    "optimize": ("torch._dynamo:optimize", "2.11-2.13"),
    "compile_lock": ("torch._dynamo.convert_frame:compile_lock", "2.11-2.13"),
    "lazy_graphs": ("torch.fx._lazy_graph_module", "2.11-2.13"),
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
    "SchedulerNode": ("torch._inductor.scheduler:SchedulerNode", "2.11-2.13"),
    "AsyncCompile": ("torch._inductor.async_compile:AsyncCompile", "2.11-2.13"),
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
    "front_end": ("torch._dynamo.symbolic_convert", "2.11-2.13"),
    "guards_of_front_end": ("torch._dynamo.guards", "2.11-2.13"),
    "side_effects": ("torch._dynamo.side_effects", "2.11-2.13"),
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
    "TorchFunction": ("torch._dynamo.variables:TorchInGraphFunctionVariable", "2.11-2.13"),
    "NullContext": ("torch._dynamo.variables.ctx_manager:NullContextVariable", "2.11-2.13"),
    "tracing_states": ("torch._dynamo.variables.torch:tracing_state_functions", "2.11-2.13"),
    "trace_rules": ("torch._dynamo.trace_rules:get_torch_obj_rule_map", "2.11-2.13"),
    "TracedGraph": ("torch._dynamo.output_graph:OutputGraph", "2.11-2.13"),
    "TracedConstant": ("torch._dynamo.variables:ConstantVariable", "2.11-2.13"),
    "fake_kernels": ("torch._subclasses.fake_impls:op_implementations_dict", "2.13"),
    "grouped_product_result": ("torch._meta_registrations:_create_grouped_mm_output_tensor", "2.13"),
    "AnyBatchNorm": ("torch.nn.modules.batchnorm:_BatchNorm", "2.11, 2.13"),
    "TracedObject": ("torch._dynamo.variables:UserDefinedObjectVariable", "2.11, 2.13"),
    "TracedHooks": ("torch._dynamo.variables:BackwardHookVariable", "2.11, 2.13"),
    "TracedTuple": ("torch._dynamo.variables:TupleVariable", "2.11, 2.13"),
    "wrap_traced": ("torch._dynamo.variables.builder:wrap_fx_proxy", "2.11, 2.13"),
    "install_guard": ("torch._dynamo.guards:install_guard", "2.11, 2.13"),
    "GuardBuilder": ("torch._dynamo.guards:GuardBuilder", "2.11, 2.13"),
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
    "check_input_dim": ("_check_input_dim", "torch.nn:BatchNorm1d", "2.13"),
    "get_backward_hooks": ("_get_backward_hooks", "torch.nn:Module", "2.13"),
    "get_backward_pre_hooks": ("_get_backward_pre_hooks", "torch.nn:Module", "2.13"),
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


def find(place: str) -> Any:
    """The object at "module:attribute.path"; raises AttributeError or ImportError where there is none."""
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split(".") if path else ():
        found = getattr(found, name)
    return found


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
