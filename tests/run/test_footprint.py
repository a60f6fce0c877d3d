"""The footprint of compiled graphs: by hand on short texts, against what really lives on compiled steps."""

import ctypes
import functools
import textwrap
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own habit
from torch import nn

from lowtide._torch import private
from lowtide.measuring.tracker import generated_code_tells, live_storages
from lowtide.plans.graph import Graph, Op
from lowtide.run.generated_code.footprint import footprint
from lowtide.run.generated_code.ledger import Handed
from lowtide.run.generated_code.moment import Moment
from lowtide.run.generated_code.reader import UnreadableSourceError
from lowtide.run.inductor import peak

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:Torchinductor does not support code generation for complex:UserWarning"
    ),
]

KIB = 1024


def text(body, *, shapes=(), before=""):
    """A graph as Inductor writes it, with an input of floats for each shape."""
    names = [f"primals_{i + 1}" for i in range(len(shapes))]
    take = f"{', '.join(names)}, = args\nargs.clear()\n" if names else ""
    makes = [
        f"{name} = rand_strided(({size},), (1,), device='cpu', dtype=torch.float32)"
        for name, size in zip(names, shapes, strict=True)
    ]
    lines = [
        *before.splitlines(),
        "class Runner:",
        "    def call(self, args):",
        *textwrap.indent(take + textwrap.dedent(body).strip(), " " * 8).splitlines(),
        "runner = Runner(partitions=[partition_0,])" if before else "runner = Runner(partitions=[])",
        "def get_args():",
        *(f"    {line}" for line in (*makes, f"return [{', '.join(names)}]")),
    ]
    return "\n".join(lines)


def bytes_at_calls(source, **options):
    return [(moment.call, moment.bytes) for moment in footprint(source, **options).moments]


# ---- short texts


def test_buffers_live_from_allocation_to_del():
    source = text("""
        buf0 = empty_strided_cpu((10, 10), (10, 1), torch.float32)
        cpp_fused_0(buf0)
        buf1 = empty_strided_cpu((10, ), (1, ), torch.bfloat16)
        cpp_fused_1(buf0, buf1)
        del buf0
        cpp_fused_2(buf1)
        return (buf1, )
    """)
    found = footprint(source)
    assert [moment.bytes for moment in found.moments] == [400, 420, 20]
    assert (found.peak, found.left, found.outputs) == (420, 20, (Handed(1, 20),))


def test_a_name_keeps_what_another_name_gave_up():
    source = text("""
        buf0 = empty_strided_cpu((100, ), (1, ), torch.float32)
        buf1 = buf0; del buf0  # reuse
        kernel_1(buf1)
        buf2 = reinterpret_tensor(buf1, (10, 10), (10, 1), 0); del buf1  # reuse
        kernel_2(buf2)
        buf2 = None
        kernel_3()
        return (buf2, )
    """)
    assert bytes_at_calls(source) == [("kernel_1", 400), ("kernel_2", 400), ("kernel_3", 0)]
    assert footprint(source).outputs == (None,)


def test_an_item_keeps_its_storage_and_not_its_siblings():
    source = text(
        """
        buf0 = torch.ops.aten.sort.stable(primals_1, stable=True, dim=0, descending=False)
        buf1 = buf0[0]
        assert_size_stride(buf1, (100, ), (1, ), 'torch.ops.aten.sort.stable')
        kernel_1(buf1)
        del buf0
        kernel_2(buf1)
        return (buf1, )
        """,
        shapes=[100],
    )
    moments = footprint(source).moments
    assert moments[0] == Moment("aten.sort.stable", 400 + 800, ((100,), (100,)), ((100,),))
    assert [moment.bytes for moment in moments[1:]] == [1200, 400]


def test_views_that_an_operator_returns_are_free():
    source = text(
        """
        buf0 = torch.ops.aten.split.Tensor(primals_1, 50)
        buf1 = buf0[1]
        buf2 = torch.ops.aten.view.dtype(buf1, torch.int32)
        return (buf1, buf2, )
        """,
        shapes=[100],
    )
    found = footprint(source)
    assert (found.peak, found.left, found.outputs) == (0, 0, (Handed(0, 0), Handed(0, 0)))


def test_freed_inputs_are_taken_off():
    source = text(
        """
        buf0 = empty_strided_cpu((100, ), (1, ), torch.float32)
        kernel_1(primals_1, primals_2, buf0)
        del primals_1
        kernel_2(primals_2, buf0)
        del primals_2
        kernel_3(buf0)
        return (buf0, primals_3, )
        """,
        shapes=[100, 25, 10],
    )
    assert [found for _, found in bytes_at_calls(source)] == [400, 400, 400]
    assert [found for _, found in bytes_at_calls(source, inputs=[0, 100, 40])] == [400, 400, 300]
    found = footprint(source, inputs=[400, 100, 40])
    assert [moment.bytes for moment in found.moments] == [400, 0, -100]
    assert (found.peak, found.left) == (400, -100)
    assert found.outputs == (Handed(3, 400), Handed(2, 40))


def test_inputs_that_are_never_deleted_go_at_the_end():
    assert footprint(text("return ()", shapes=[100]), inputs=[400]).left == -400


def test_inputs_of_one_storage_go_together():
    source = text(
        "kernel_1(primals_2)\ndel primals_1\nkernel_2()\ndel primals_2\nkernel_3()", shapes=[30, 20]
    )
    apart = footprint(source, inputs=[120, 80])
    assert [moment.bytes for moment in apart.moments] == [0, -120, -200]
    together = footprint(source, inputs=[Handed(7, 200), Handed(7, 200)])
    assert [moment.bytes for moment in together.moments] == [0, 0, -200]


def test_inputs_that_the_text_lays_into_one_storage():
    source = text("del primals_1\nkernel_1()\ndel primals_2\nkernel_2()", shapes=[30, 20])
    shared = "_shared_storage_0 = rand_strided((50,), (1,), device='cpu', dtype=torch.float32)"
    for name, size in (("primals_1", 30), ("primals_2", 20)):
        own = f"{name} = rand_strided(({size},), (1,), device='cpu', dtype=torch.float32)"
        as_view = f"{name} = torch.as_strided(_shared_storage_0, ({size}, ), (1, ))"
        source = source.replace(own, as_view)
    source = source.replace("def get_args():", f"def get_args():\n    {shared}")
    assert [found for _, found in bytes_at_calls(source, inputs=[200, 200])] == [0, -200]


def test_a_donated_input_is_written_in_place():
    source = text("buf0 = primals_1; del primals_1  # reuse\nkernel(buf0)\nreturn (buf0, )", shapes=[100])
    found = footprint(source, inputs=[400])
    assert (found.peak, found.left, found.outputs) == (0, 0, (Handed(0, 400),))


def test_wrong_number_of_inputs():
    with pytest.raises(ValueError, match="takes 1 inputs, and 2"):
        footprint(text("return ()", shapes=[100]), inputs=[400, 400])


def test_a_buffer_with_padding_and_a_pool():
    source = text("""
        buf0 = empty_strided_cpu((10, 16), (16, 1), torch.float32).as_strided((10, 12), (16, 1))
        pool0 = empty_strided_cpu((2048, ), (1, ), torch.uint8)
        buf1 = alloc_from_pool(pool0, 1024, torch.float32, (16, 16), (16, 1))
        del pool0
        kernel_1(buf0, buf1)
        del buf1
        kernel_2(buf0)
    """)
    assert bytes_at_calls(source) == [("kernel_1", 640 + 2048), ("kernel_2", 640)]


def test_rounding_and_other_devices():
    source = text("""
        buf0 = empty_strided_cuda((10, ), (1, ), torch.float32)
        buf1 = empty_strided_cpu((10, ), (1, ), torch.float32)
        buf2 = empty_strided_cpu_pinned((10, ), (1, ), torch.float32)
        buf3 = torch.ops.prims.normal.default([10], mean=0.0, std=1.0, dtype=torch.float32,
            device=device(type='cuda', index=0), requires_grad=False)
        kernel(buf0)
    """)
    by_blocks = {"rounded": lambda size: -(-size // 512) * 512}
    assert bytes_at_calls(source)[-1] == ("kernel", 160)
    assert bytes_at_calls(source, device="cuda", **by_blocks)[-1] == ("kernel", 1024)
    assert bytes_at_calls(source, device="cpu", **by_blocks)[-1] == ("kernel", 1024)


def test_what_library_functions_and_operators_write():
    source = text(
        """
        buf0 = empty_strided_cpu((4, 5), (5, 1), torch.float32)
        extern_kernels.mm(reinterpret_tensor(primals_1, (4, 2), (2, 1), 0), primals_2, out=buf0)
        aten.index_put_(buf0, [primals_1], primals_2, True)
        buf0.zero_()
        triton_poi_fused_add_3.run(buf0, 20, stream=stream0)
        """,
        shapes=[8, 10],
    )
    assert footprint(source).moments == (
        Moment("extern_kernels.mm", 80, ((4, 5),)),
        Moment("aten.index_put_", 80, ((4, 5),)),
        Moment("zero_", 80),
        Moment("triton_poi_fused_add_3", 80),
    )


def test_symbols_have_the_sizes_of_the_example():
    source = text(
        "s0 = primals_1\nbuf0 = empty_strided_cpu((s0, 3*s0), (3*s0, 1), torch.float32)\nreturn (buf0, )"
    )
    source = source.replace("return []", "primals_1 = 5\n    return [primals_1]")
    source = source.replace(
        "s0 = primals_1", "primals_1, = args\n        args.clear()\n        s0 = primals_1"
    )
    assert footprint(source).left == 4 * 5 * 15


def test_constants_are_not_the_graphs():
    source = text("buf0 = torch.ops.aten.view.default(constant0, [10])\nreturn (buf0, constant0, )")
    constant = (
        "global constant0\n    constant0 = rand_strided((10,), (1,), device='cpu', dtype=torch.float32)"
    )
    source = source.replace("def get_args():", f"def get_args():\n    {constant}")
    found = footprint(source)
    assert (found.peak, found.outputs) == (0, (Handed(0, 0), Handed(0, 0)))


PARTITION = """
def partition_0(args):
    primals_1, buf0 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf1 = empty_strided_cuda((10, ), (1, ), torch.float32)
        triton_0.run(primals_1, buf0, buf1, stream=stream0)
        del buf0
        triton_1.run(primals_1, buf1, stream=stream0)
        del primals_1
    return (buf1, )
"""


@pytest.mark.parametrize(("deleted", "after"), [("del primals_1, buf0", [80, 40, 0]), ("", [80, 80, 80])])
def test_partitions_hold_what_they_are_given(deleted, after):
    source = text(
        f"""
        buf0 = empty_strided_cuda((10, ), (1, ), torch.float32)
        partition0_args = [primals_1, buf0]
        {deleted}
        (buf1,) = self.partitions[0](partition0_args)
        del partition0_args
        triton_2.run(buf1, stream=stream0)
        return (buf1, )
        """,
        shapes=[10],
        before=PARTITION,
    )
    assert [found for _, found in bytes_at_calls(source, inputs=[40])] == after


# ---- texts as torch 2.11 and 2.13 write them for a GPU

FORWARD_2_11 = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
        primals_1, primals_2, primals_3, primals_4 = args
        args.clear()
        assert_size_stride(primals_1, (64, 64), (64, 1))
        assert_size_stride(primals_2, (64, ), (1, ))
        assert_size_stride(primals_3, (2, 16, 64), (1024, 64, 1))
        assert_size_stride(primals_4, (8, 2, 3, 3), (18, 9, 3, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((32, 64), (64, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.addmm]
            extern_kernels.addmm(primals_2, reinterpret_tensor(primals_3, (32, 64), (64, 1), 0), reinterpret_tensor(primals_1, (64, 64), (1, 64), 0), alpha=1, beta=1, out=buf0)
            del primals_2
            buf1 = torch.ops.aten._scaled_dot_product_flash_attention.default(reinterpret_tensor(buf0, (2, 4, 16, 16), (1024, 16, 64, 1), 0), reinterpret_tensor(buf0, (2, 4, 16, 16), (1024, 16, 64, 1), 0), reinterpret_tensor(buf0, (2, 4, 16, 16), (1024, 16, 64, 1), 0), 0.0, True, scale=0.25)
            buf2 = buf1[0]
            assert_size_stride(buf2, (2, 4, 16, 16), (1024, 16, 64, 1), 'torch.ops.aten._scaled_dot_product_flash_attention.default')
            assert_alignment(buf2, 16, 'torch.ops.aten._scaled_dot_product_flash_attention.default')
            buf3 = buf1[1]
            assert_size_stride(buf3, (2, 4, 16), (64, 16, 1), 'torch.ops.aten._scaled_dot_product_flash_attention.default')
            assert_alignment(buf3, 16, 'torch.ops.aten._scaled_dot_product_flash_attention.default')
            del buf1
            # Topologically Sorted Source Nodes: [conv], Original ATen: [aten.convolution]
            buf4 = extern_kernels.convolution(reinterpret_tensor(buf0, (2, 2, 16, 32), (1024, 512, 32, 1), 0), primals_4, stride=(1, 1), padding=(1, 1), dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=1, bias=None)
            assert_size_stride(buf4, (2, 8, 16, 32), (4096, 512, 32, 1), 'torch.ops.aten.convolution.default')
            buf5 = buf4; del buf4  # reuse
            buf6 = empty_strided_cuda((2, 16, 1), (16, 1, 32), torch.float32)
            workspace_0 = empty_strided_cuda((1024, ), (1, ), torch.uint8)
            workspace_0.zero_()
            stream0 = get_raw_stream(0)
            triton_red_fused_convolution_sum_1.run(buf5, buf6, workspace_0, 32, 64, stream=stream0)
            del workspace_0
            stream0 = get_raw_stream(0)
            triton_poi_fused_tanh_2.run(buf5, 8192, stream=stream0)
        return (buf5, primals_1, primals_3, buf0, buf2, buf3, reinterpret_tensor(buf6, (2, 16), (16, 1), 0), )

runner = Runner(partitions=[])
call = runner.call
recursively_apply_fns = runner.recursively_apply_fns


def get_args():
    from torch._dynamo.testing import rand_strided
    primals_1 = rand_strided((64, 64), (64, 1), device='cuda:0', dtype=torch.bfloat16)
    primals_2 = rand_strided((64, ), (1, ), device='cuda:0', dtype=torch.bfloat16)
    primals_3 = rand_strided((2, 16, 64), (1024, 64, 1), device='cuda:0', dtype=torch.bfloat16)
    primals_4 = rand_strided((8, 2, 3, 3), (18, 9, 3, 1), device='cuda:0', dtype=torch.bfloat16)
    return [primals_1, primals_2, primals_3, primals_4]


def benchmark_compiled_module(args, times=10, repeat=10):
    from torch._inductor.utils import print_performance
    fn = lambda: call(list(args))
    return print_performance(fn, times=times, repeat=repeat)
"""  # noqa: E501  # as Inductor writes it

BACKWARD_2_13 = """
class Runner:
    def call(self, args):
        primals_4, buf, getitem_1, tangents_1, fwd_rng_state_0 = args
        args.clear()
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            tangents_1 = copy_if_misaligned(tangents_1)
            assert_size_stride(tangents_1, (2, 8, 16, 32), (4096, 512, 32, 1), 'input')
            assert_size_stride(buf, (2, 2, 16, 32), (1024, 512, 32, 1), 'input')
            buf0 = empty_strided_cuda((2, 8, 16, 32), (4096, 512, 32, 1), torch.bfloat16)
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_tanh_backward_0.run(tangents_1, buf0, 8192, stream=raw_stream0)
            del tangents_1
            # Topologically Sorted Source Nodes: [], Original ATen: [aten.convolution_backward]
            buf1 = torch.ops.aten.convolution_backward.default(buf0, buf, primals_4, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
            del buf
            del buf0
            del primals_4
            buf2 = buf1[0]
            assert_size_stride(buf2, (2, 2, 16, 32), (1024, 512, 32, 1), 'torch.ops.aten.convolution_backward.default')
            buf3 = buf1[1]
            assert_size_stride(buf3, (8, 2, 3, 3), (18, 9, 3, 1), 'torch.ops.aten.convolution_backward.default')
            del buf1
            raw_stream0 = get_raw_stream(0)
            triton_poi_fused_1.run(buf2, getitem_1, 2048, stream=raw_stream0)
            del getitem_1
        return (buf3, buf2, None, )

runner = Runner(partitions=[])


def get_args():
    from torch._dynamo.testing import rand_strided
    primals_4 = rand_strided((8, 2, 3, 3), (18, 9, 3, 1), device='cuda:0', dtype=torch.bfloat16)
    _shared_storage_0 = rand_strided((2048,), (1,), device='cuda:0', dtype=torch.bfloat16)
    buf = torch.as_strided(_shared_storage_0, (2, 2, 16, 32), (1024, 512, 32, 1))
    getitem_1 = torch.as_strided(_shared_storage_0, (2, 16, 64), (1024, 64, 1))
    tangents_1 = rand_strided((2, 8, 16, 32), (4096, 512, 32, 1), device='cuda:0', dtype=torch.bfloat16)
    fwd_rng_state_0 = torch.cuda.default_generators[0].graphsafe_get_state()
    return [primals_4, buf, getitem_1, tangents_1, fwd_rng_state_0]
"""  # noqa: E501  # as Inductor writes it


def test_forward_on_a_gpu_by_hand():
    """4 KiB each of linear and attention output, 16 KiB of convolution; all the rest is a block of 512."""
    found = footprint(FORWARD_2_11, rounded=lambda size: -(-size // 512) * 512, device="cuda")
    linear, attention, conv, block = 4 * KIB, 4 * KIB, 16 * KIB, 512
    flash = attention + 3 * block  # the log-sum-exp and two of random state; the mask is empty
    by_call = {moment.call: moment.bytes for moment in found.moments}
    assert by_call["extern_kernels.addmm"] == linear
    assert by_call["aten._scaled_dot_product_flash_attention"] == linear + flash
    kept = linear + attention + block
    assert by_call["extern_kernels.convolution"] == kept + conv
    assert by_call["zero_"] == kept + conv + block + 2 * block
    assert by_call["triton_red_fused_convolution_sum_1"] == kept + conv + block + 2 * block
    assert by_call["triton_poi_fused_tanh_2"] == found.left == kept + conv + block
    assert found.peak == kept + conv + 3 * block
    assert [handed.bytes for handed in found.outputs] == [conv, 0, 0, linear, attention, block, block]
    assert [handed.storage for handed in found.outputs][1:3] == [0, 2]
    written = {moment.call: moment.outputs for moment in found.moments}
    assert written["extern_kernels.convolution"] == ((2, 8, 16, 32),)


def test_backward_on_a_gpu_by_hand():
    """The tangents (16 KiB) go first; the shared activation (4 KiB) goes with the second of its two views."""
    found = footprint(BACKWARD_2_13, inputs=[0, 4 * KIB, 4 * KIB, 16 * KIB, 0], device="cuda")
    weight = 2 * 8 * 2 * 9
    assert [(moment.call, moment.bytes) for moment in found.moments] == [
        ("triton_poi_fused_tanh_backward_0", 16 * KIB),
        ("aten.convolution_backward", 4 * KIB + weight),
        ("triton_poi_fused_1", weight + 4 * KIB - 16 * KIB),
    ]
    assert found.left == weight - 16 * KIB
    assert found.outputs == (Handed(7, weight), Handed(6, 4 * KIB), None)


# ---- what cannot be read is refused


@pytest.mark.parametrize(
    "line",
    [
        "if buf0.item():\n    kernel(buf0)",
        "while True:\n    kernel(buf0)",
        "u0 = buf0.item()",
        "buf1 = helper(buf0)",
        "buf1 = torch.ops.nobody.knows.default(buf0)",
        "buf1 = torch.ops.aten.nonzero.default(buf0)",
        "buf1 = empty_strided_cpu((u0, ), (1, ), torch.float32)",
        "buf1 = empty_strided_p2p((10, ), (1, ), torch.float32)",
        "assert_size_stride(buf0, (11, ), (1, ), 'input')",
        "assert_size_stride(buf0, (10, ), (2, ), 'input')",
        "del nobody",
        "return (nobody, )",
        "buf0[0] = 1",
    ],
)
def test_lines_that_say_nothing_certain(line):
    source = text(f"buf0 = empty_strided_cpu((10, ), (1, ), torch.float32)\n{line}")
    with pytest.raises(UnreadableSourceError, match="line 4 of the compiled graph"):
        footprint(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("#include <cmath>\nint main() { }", "not Python"),
        ("call = load(cpp_source)", "no Python function call"),
        ("def call(args):\n    return ()", "no Python function get_args"),
    ],
)
def test_texts_of_another_kind(source, why):
    with pytest.raises(UnreadableSourceError, match=why):
        footprint(source)


# ---- compiled steps, against what really lives


@pytest.fixture
def without_kernels(monkeypatch):
    """Inductor without a C++ compiler: kernels that do nothing, on buffers of zeros. Memory is the same."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    guards = private("guards")
    allocate = guards._empty_strided_cpu

    def zeros(*layout):
        buffer = allocate(*layout)
        ctypes.memset(buffer.data_ptr(), 0, buffer.untyped_storage().nbytes())
        return buffer

    monkeypatch.setattr(guards, "_empty_strided_cpu", zeros)
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, types, source: lambda *arguments: None)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # found by compiling
    with fresh_cache():
        yield


class Watched:
    """A compiled graph that notes what its call takes, on a tracker of live storages."""

    def __init__(self, compiled):
        self._boxed_call = True
        self.compiled = compiled
        self.source = compiled.source_code
        self.tracker = None

    def __call__(self, arguments):
        if self.tracker is None:
            return self.compiled(arguments)
        for argument in arguments:
            self.tracker.give(argument)
        storages = [argument.untyped_storage() for argument in arguments]
        before, keys = self.tracker.made, [storage._cdata for storage in storages]
        self.tracker.made_peak = before
        alive = [(storage.nbytes(), weakref.ref(storage)) for storage in storages]
        del storages, argument
        results = self.compiled(arguments)
        freed = [0 if reference() else size for size, reference in alive]
        self.inputs = [Handed(key, size) for key, size in zip(keys, freed, strict=True)]
        self.truth = self.tracker.made_peak - before, self.tracker.made - before
        self.storages = [None if result is None else result.untyped_storage()._cdata for result in results]
        self.sizes = [None if result is None else result.untyped_storage().nbytes() for result in results]
        return results


def watched_step(model, batch):
    """The graphs of a training step, after a second step under the tracker."""
    graphs = []

    def inner(module, examples, **options):
        graphs.append(Watched(private("compile_fx_inner")(module, examples, **options)))
        return graphs[-1]

    compiled = torch.compile(model, backend=functools.partial(private("compile_fx"), inner_compile=inner))
    with private("functorch_config").patch(enable_autograd_cache=False):
        compiled(*batch).backward()
        tracker = live_storages()
        for graph in graphs:
            graph.tracker = tracker
        with generated_code_tells(tracker), tracker.mode:
            compiled(*batch).backward()
    return graphs


class Step(nn.Module):
    def __init__(self, forward, *modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.run = forward

    def forward(self, *batch):
        return self.run(*self.parts, *batch).square().mean()


def attention(linear, x):
    q, k, v = linear(x).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v)


def unrolled(cell, x):
    state = torch.zeros(4, 16), torch.zeros(4, 16)
    for frame in x:
        state = cell(frame, state)
    return state[0]


def ranked(linear, x):
    values, indices = linear(x).sort(1)
    return values * indices


STEPS = {
    "mlp": lambda: (
        Step(lambda a, b, x: b(F.gelu(a(x))), nn.Linear(16, 64), nn.Linear(64, 8)),
        [torch.randn(16, 16)],
    ),
    "convolution and batch norm": lambda: (
        Step(
            lambda m, x: m(x),
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        ),
        [torch.randn(4, 3, 8, 8)],
    ),
    "transposed and grouped convolution": lambda: (
        Step(
            lambda m, x: m(x),
            nn.Sequential(nn.ConvTranspose2d(4, 4, 2), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4)),
        ),
        [torch.randn(2, 4, 8, 8)],
    ),
    "attention": lambda: (Step(attention, nn.Linear(32, 96)), [torch.randn(2, 10, 32)]),
    "softmax of products": lambda: (
        Step(lambda m, x: (m(x) @ m(x).transpose(1, 2)).softmax(-1), nn.Linear(16, 32)),
        [torch.randn(3, 8, 16)],
    ),
    "layer norm": lambda: (
        Step(
            lambda m, x: m(x),
            nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 16)),
        ),
        [torch.randn(8, 16)],
    ),
    "embedding": lambda: (
        Step(lambda e, m, i: m(e(i)), nn.Embedding(50, 16), nn.Linear(16, 16)),
        [torch.randint(0, 50, (4, 9))],
    ),
    "dropout": lambda: (
        Step(
            lambda m, x: m(x), nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 8))
        ),
        [torch.randn(8, 16)],
    ),
    "cat and split": lambda: (
        Step(lambda m, x: torch.cat([*map(torch.tanh, m(x).split([8, 16, 8], 1)), x], 1), nn.Linear(16, 32)),
        [torch.randn(8, 16)],
    ),
    "sort": lambda: (Step(ranked, nn.Linear(16, 32)), [torch.randn(8, 16)]),
    "top-k": lambda: (Step(lambda m, x: m(x).topk(5, 1).values, nn.Linear(16, 32)), [torch.randn(8, 16)]),
    "cumulative sum": lambda: (
        Step(lambda m, x: m(x).cumsum(1).exp().cumsum(0), nn.Linear(16, 32)),
        [torch.randn(8, 16)],
    ),
    "index_put": lambda: (
        Step(
            lambda a, b, x, i: a(x).index_put((i,), b(x)[:3], accumulate=True),
            *(nn.Linear(16, 8) for _ in "ab"),
        ),
        [torch.randn(8, 16), torch.tensor([1, 1, 2])],
    ),
    "recurrent cell": lambda: (Step(unrolled, nn.LSTMCell(8, 16)), [torch.randn(5, 4, 8)]),
    "complex numbers": lambda: (
        Step(lambda m, x: torch.fft.rfft(m(x)).abs(), nn.Linear(16, 32)),
        [torch.randn(8, 16)],
    ),
}


def groups(keys):
    """Which places hold the same key."""
    return [keys.index(key) for key in keys]


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_compiled_steps_to_the_byte(name, without_kernels):
    graphs = watched_step(*STEPS[name]())
    assert len(graphs) == 2
    for graph in graphs:
        found = footprint(graph.source, inputs=graph.inputs)
        assert (found.peak, found.left) == graph.truth
        assert found.peak == max(moment.bytes for moment in found.moments)
        storages = [handed and handed.storage for handed in found.outputs]
        assert groups(storages) == groups(graph.storages)
        made = [
            (size, handed.bytes) for size, handed in zip(graph.sizes, found.outputs, strict=True) if handed
        ]
        assert all(size == told or told == 0 for size, told in made)
    assert any(handed.bytes for handed in graphs[1].inputs)  # a backward frees what the forward saved


@pytest.mark.slow
def test_the_forwards_outputs_are_the_backwards_inputs(without_kernels):
    """q, k and v are views of one storage, which goes with the last of them."""
    forward, backward = watched_step(*STEPS["attention"]())
    saved = footprint(forward.source).outputs[1:]
    freed = [known and Handed(known.storage, known.bytes) for known in saved]
    assert len({handed.storage for handed in freed}) < len(freed)
    found = footprint(backward.source, inputs=[*freed, backward.inputs[-1]])
    assert (found.peak, found.left) == backward.truth


@pytest.mark.slow
def test_a_cached_graph_has_its_text(without_kernels):
    first = watched_step(*STEPS["mlp"]())
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=True):
        again = watched_step(*STEPS["mlp"]())
    hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
    assert hits >= 2
    assert [graph.source for graph in again] == [graph.source for graph in first]
    assert all(type(graph.compiled).__name__ == "CompiledFxGraph" for graph in again)


@torch.compiler.nested_compile_region
def repeated(x, weight):
    return torch.tanh(x @ weight).sin()


@pytest.mark.slow
def test_nested_regions_are_followed(without_kernels):
    step = Step(lambda m, x: repeated(repeated(x, m.weight), m.weight), nn.Linear(16, 16, bias=False))
    graphs = watched_step(step, [torch.randn(8, 16)])
    for graph in graphs:
        found = footprint(graph.source, inputs=graph.inputs)
        assert (found.peak, found.left) == graph.truth


@pytest.mark.slow
def test_control_flow_is_refused(without_kernels):
    def branch(linear, x):
        return torch.cond(x.sum() > 0, lambda y: linear(y), lambda y: linear(y).sin(), (x,))

    for graph in watched_step(Step(branch, nn.Linear(16, 16)), [torch.ones(8, 16)]):
        with pytest.raises(UnreadableSourceError, match=r"if .*item"):
            footprint(graph.source)


@pytest.mark.parametrize(("turned", "calls", "left"), [("", [], 128), (".to(torch.bfloat16)", ["to"], 64)])
def test_the_parts_of_a_workspace_are_summed(turned, calls, left):
    source = f"""
def call(args):
    arg0, = args
    args.clear()
    workspace_0 = empty_strided_cuda((2048, ), (1, ), torch.float32)
    triton_per_fused_0.run(arg0, workspace_0, 1, stream=stream0)
    buf1 = workspace_0[0 * 1024:(0 + 1) * 1024].view(32, 32).sum(dim=0){turned}
    del workspace_0
    return (buf1, )


def get_args():
    arg0 = rand_strided((4, ), (1, ), device='cuda:0', dtype=torch.float32)
    return [arg0]
"""
    found = footprint(source)
    assert [moment.call for moment in found.moments] == ["triton_per_fused_0", "sum", *calls]
    assert (found.peak, found.left) == (8192 + 128 + left * len(calls), left)


@pytest.mark.parametrize(
    ("strides", "channels_last"), [("(2048, 256, 16, 1)", False), ("(2048, 1, 128, 8)", True)]
)
def test_a_convolution_tells_the_layout_that_it_reads(strides, channels_last):
    text = f"""
def call(args):
    arg0, arg1 = args
    args.clear()
    buf0 = extern_kernels.convolution(arg0, arg1, stride=(1, 1), padding=(0, 0), dilation=(1, 1), transposed=False, output_padding=(0, 0), groups=1, bias=None)
    return (buf0, )

def get_args():
    arg0 = rand_strided((2, 8, 16, 16), {strides}, device='cuda:0', dtype=torch.float32)
    arg1 = rand_strided((4, 8, 1, 1), (8, 1, 1, 1), device='cuda:0', dtype=torch.float32)
    return [arg0, arg1]
"""  # noqa: E501  # as Inductor writes it
    (moment,) = footprint(text, device="cuda").moments
    assert moment.channels_last == channels_last
    assert moment.inputs == ((2, 8, 16, 16), (4, 8, 1, 1))


def test_a_convolution_takes_what_one_of_its_shapes_takes(monkeypatch):
    taken = {8: 100, 64: 1000}  # by the channels that it reads; the results are alike
    monkeypatch.setattr(peak, "Workspaces", lambda device: lambda node, **layout: taken[channels(node)])
    nodes = {str(count): convolution(count) for count in taken}
    ops = tuple(Op(name, (), ()) for name in nodes)
    lifted = SimpleNamespace(graph=Graph(ops=ops, values=(), prices="measured on a GPU"), node_of=nodes)
    workspace = peak._Workspace(lifted, torch.device("cuda"))

    def at(*inputs):
        return workspace.at(Moment("extern_kernels.convolution", 0, ((2, 4, 16, 16),), inputs))

    assert at((2, 8, 16, 16), (4, 8, 1, 1)) == 100
    assert at((2, 64, 16, 16), (4, 64, 1, 1)) == 1000
    assert at() == 1000  # what it reads is not told: the most


def convolution(count):
    """A node that reads n channels."""
    graph = torch.fx.Graph()
    image, weight = (graph.placeholder(name) for name in ("image", "weight"))
    node = graph.call_function(torch.ops.aten.convolution.default, (image, weight, None))
    shapes = ((2, count, 16, 16), (4, count, 1, 1), (2, 4, 16, 16))
    for part, shape in zip((image, weight, node), shapes, strict=True):
        part.meta["val"] = torch.empty(shape, device="meta")
    return node


def channels(node):
    return node.args[0].meta["val"].shape[1]
