"""The tracker of live storages against counts by hand."""

import sys
import textwrap

import pytest
import torch
from torch import nn

from lowtide import measure
from lowtide._torch import generated_modules, private

# Inductor's own imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

N = 1000
BYTES = 4 * N


@pytest.fixture
def x():
    return torch.ones(N)


def peak(step, **options):
    return measure(step, device="cpu", **options).peak


def test_what_was_there_and_what_is_made(x):
    assert peak(lambda: x + 1) == 2 * BYTES
    assert peak(lambda: (x + 1, x + 2)) == 3 * BYTES


def test_nothing_at_all():
    assert peak(lambda: None) == 0


def test_untouched_tensors_do_not_count(x):
    torch.ones(N)
    assert peak(lambda: torch.zeros(N)) == BYTES


def test_views_are_free(x):
    assert peak(lambda: (x.view(10, 100), x[5:], x.view(10, 100).t(), x.expand(7, N))) == BYTES


def test_view_counts_its_whole_storage(x):
    assert peak(lambda: x[:1] + 1) == BYTES + 4


def test_view_keeps_its_storage_alive(x):
    def step():
        part = (x + 1)[:1]
        other = x + 2
        return part, other

    assert peak(step) == 3 * BYTES


def test_in_place_is_free(x):
    assert peak(lambda: x.add_(1).mul_(2)) == BYTES
    assert peak(lambda: torch.add(x, 1, out=x)) == BYTES


def test_freed_storages_leave(x):
    def step():
        y = x
        for _ in range(5):
            y = y + 1

    assert peak(step) == 3 * BYTES


def test_freed_before_the_next_is_made(x):
    def step():
        y = x + 1
        del y
        z = x + 2
        del z

    assert peak(step) == 2 * BYTES


def test_what_was_there_counts_until_it_is_freed():
    held = [torch.ones(N)]

    def step():
        y = held[0] + 1
        held.clear()
        z = y + 1
        return y + z

    assert peak(step) == 3 * BYTES


def test_resident_tensors_count_once(x):
    state = torch.zeros(N, dtype=torch.float64)
    assert peak(lambda: x + 1, resident=[state]) == 2 * BYTES + 8 * N
    assert peak(lambda: x + 1, resident=[x, x[1:], x]) == 2 * BYTES


def test_temporaries_inside_an_op_do_not_count():
    x = torch.randn(10, 100)
    assert peak(lambda: torch.logsumexp(x, 1)) == BYTES + 40


def test_other_devices_and_empty_storages_do_not_count(x):
    assert peak(lambda: (torch.empty(N, device="meta"), torch.empty(0), x * 1)) == 2 * BYTES


def test_nested_measures_see_the_same(x):
    found = []

    def outer():
        y = x + 1
        found.append(peak(lambda: (y + 1, y + 2)))
        return y + 3

    assert peak(outer) == 4 * BYTES
    assert found == [3 * BYTES]


def test_one_measure_after_the_other(x):
    assert [peak(lambda: x + 1) for _ in range(3)] == [2 * BYTES] * 3


def test_training_step_by_hand():
    """At the peak: weight, bias and batch; the output's gradient, the loss and its own."""
    linear, x = nn.Linear(100, 10), torch.ones(20, 100)
    given = 4 * (1000 + 10 + 2000)
    tangents = 4 * (1 + 1)
    gradients = 4 * (1000 + 10)
    assert peak(lambda: linear(x).sum().backward()) == given + tangents + gradients


def test_failing_step_leaves_no_mode_behind(x):
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")
    assert peak(lambda: x + 1) == 2 * BYTES


def test_seconds_are_positive(x):
    assert measure(lambda: x + 1, device="cpu").seconds > 0


# ---- steps that Inductor compiled


@pytest.fixture
def inductor(monkeypatch):
    """torch.compile without a C++ compiler: kernels that do nothing. Memory is the same."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda self, types, source: lambda *arguments: None)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)  # found by compiling
    with fresh_cache():
        yield torch.compile


def generated(body):
    """The function of a module like those that Inductor writes and loads."""
    from torch._inductor.codecache import PyCodeCache

    header = """
        import torch
        aten = torch.ops.aten
        assert_size_stride = torch._C._dynamo.guards.assert_size_stride
        empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
        reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
        def call(args):
    """
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return PyCodeCache.load(textwrap.dedent(header) + body).call


BUFFER = f"empty_strided_cpu(({N}, ), (1, ), torch.float32)"


def test_buffers_count_when_they_are_allocated():
    call = generated(f"""
        buf0 = {BUFFER}
        buf1 = {BUFFER}
        del buf0
        buf2 = {BUFFER}
        del buf1
        return (buf2, )
    """)
    assert peak(lambda: call([])) == 2 * BYTES
    assert peak(lambda: (call([]), call([]))) == 3 * BYTES


def test_reuse_is_free():
    call = generated(f"""
        buf0 = {BUFFER}
        buf1 = buf0; del buf0  # reuse
        buf2 = reinterpret_tensor(buf1, (10, {N // 10}), ({N // 10}, 1), 0); del buf1  # reuse
        aten.add.out(buf2, 1, out=buf2)
        buf3 = buf2.as_strided(({N}, ), (1, ))
        return (buf3, )
    """)
    assert peak(lambda: call([])) == BYTES


def test_inputs_that_no_operator_reads_count(x):
    call = generated(f"""
        primals_1, = args
        args.clear()
        assert_size_stride(primals_1, ({N}, ), (1, ))
        buf0 = {BUFFER}
        return (buf0, )
    """)
    assert peak(lambda: call([x])) == 2 * BYTES
    assert peak(lambda: call([x]), resident=[x]) == 2 * BYTES
    assert peak(lambda: call([x + 1])) == 3 * BYTES


def test_code_that_the_cache_forgot_counts():
    from torch._inductor.codecache import PyCodeCache

    call = generated(f"return ({BUFFER}, 0)")
    PyCodeCache.cache_clear()
    assert peak(lambda: call([])) == BYTES


def test_code_loaded_meanwhile_counts():
    assert peak(lambda: generated(f"return ({BUFFER}, {BUFFER}, )")([])) == 2 * BYTES


def test_generated_code_is_as_it_was_afterwards(x):
    functions = "_empty_strided_cpu", "assert_size_stride"
    before = [getattr(private("guards"), name) for name in functions]
    generated(f"return ({BUFFER}, 1)")

    def fail():
        generated(f"return ({BUFFER}, 2)")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure(fail, device="cpu")
    assert [getattr(private("guards"), name) for name in functions] == before
    aliases = "empty_strided_cpu", "assert_size_stride"
    loaded = [[getattr(module, name) for name in aliases] for module in generated_modules()]
    assert len(loaded) > 1
    assert all(functions == before for functions in loaded)


def test_code_that_was_away_while_a_measure_ended_counts_again():
    from torch._inductor.codecache import PyCodeCache

    call = generated(f"return ({BUFFER}, 3)")
    (module,) = {module for module in generated_modules() if getattr(module, "call", None) is call}
    listed = PyCodeCache.modules
    place = listed.index(module)

    def goes_away():
        del listed[place], sys.modules[module.__name__]

    measure(goes_away, device="cpu")
    listed.insert(place, module)
    sys.modules[module.__name__] = module
    assert peak(lambda: call([])) == BYTES
    assert module.empty_strided_cpu is private("guards")._empty_strided_cpu


def test_nested_measures_of_generated_code():
    call = generated(f"return ({BUFFER}, {BUFFER}, )")
    found = []

    def outer():
        held = call([])
        found.append(peak(lambda: call([])))
        return held, call([])

    assert peak(outer) == 4 * BYTES
    assert found == [2 * BYTES]


@pytest.mark.slow
def test_compiled_function_by_hand(inductor):
    """Sine and product each have a buffer; the cosine is written over the product."""
    x, w = torch.ones(10, 100), torch.ones(100, 50)
    function = inductor(lambda x, w: (x.sin() @ w).cos())
    function(x, w)
    given, sine, product = 4 * (1000 + 5000), 4 * 1000, 4 * 500
    assert peak(lambda: function(x, w)) == given + sine + product


def test_compiling_inside_the_step_counts_the_same(inductor):
    x, w = torch.ones(10, 100), torch.ones(100, 50)
    function = inductor(lambda x, w: (x.sin() @ w).cos())
    assert peak(lambda: function(x, w)) == peak(lambda: function(x, w))


@pytest.mark.slow
def test_compiled_training_step_by_hand(inductor):
    """At the peak, the last product: the loss and its own gradient, the hidden gradient, both weights'."""
    first, second, x = nn.Linear(100, 40, bias=False), nn.Linear(40, 30, bias=False), torch.ones(20, 100)
    step = inductor(lambda x: second(first(x).tanh()).tanh().sum())

    def train():
        for layer in (first, second):
            layer.weight.grad = None
        step(x).backward()

    train()
    weights = 4 * (100 * 40 + 40 * 30)
    given = weights + 4 * 20 * 100
    losses, hidden = 4 * (1 + 1), 4 * 20 * 40
    assert peak(train) == given + losses + hidden + weights
