"""Stock recurrent modules under a budget: against the wrapped modules in float64, and measured in bytes."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from loop_part import leaves_of, loop_part, size
from lowtide import BudgetTooSmall, LowtideError
from lowtide.sequences.blocks import reversed_rows
from lowtide.sequences.passage import Passage
from lowtide.sequences.recurrent import Recurrent

KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
    "projected": (nn.LSTM, {"proj_size": 3}),
}
LIMITS = [{"slots": 2}, {"budget": "min"}, {"budget": "half"}, {"budget": "1GiB"}]


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make(kind="lstm", layers=1, hidden=5, **options):
    cls, own = KINDS[kind]
    return cls(4, hidden, layers, **own, **options)


def wrap(module, x, limit, chunk):
    """A wrapper within a limit; "half" is half way from the smallest budget to all."""
    if limit.get("budget") == "half":
        plans = [Recurrent(module, budget=budget, chunk=chunk).plan(x) for budget in ("min", "1GiB")]
        sums = [sum(p.peak for p in (plan if isinstance(plan, tuple) else (plan,))) for plan in plans]
        limit = {"budget": sum(sums) // 2}
    return Recurrent(module, chunk=chunk, **limit)


def start(module, rows):
    count = module.num_layers * (2 if module.bidirectional else 1)
    batch = () if rows is None else (rows,)
    h = torch.randn(count, *batch, module.proj_size or module.hidden_size, requires_grad=True)
    if not isinstance(module, nn.LSTM):
        return h
    return h, torch.randn(count, *batch, module.hidden_size, requires_grad=True)


def differentiated(call, wanted):
    """The results that can be differentiated, and the gradients of a fixed random sum of them."""
    made = [leaf for leaf in leaves_of(call()) if leaf.requires_grad]
    generator = torch.Generator().manual_seed(7)
    total = sum((leaf * torch.randn(leaf.shape, generator=generator)).sum() for leaf in made)
    return made + list(torch.autograd.grad(total, wanted))


def check_equal(module, wrapper, *inputs, **more):
    plain = more.pop("plain", lambda: module(*inputs))
    wanted = [leaf for leaf in leaves_of(inputs) if leaf.requires_grad]
    wanted += [parameter for parameter in module.parameters() if parameter.requires_grad]
    expected = differentiated(plain, wanted)
    found = differentiated(lambda: wrapper(*inputs, **more), wanted)
    assert [leaf.shape for leaf in found] == [leaf.shape for leaf in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS, ids=str)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_the_module(kind, bidirectional, limit):
    for steps, chunk, layers, more in [
        (1, "auto", 1, {}),
        (11, "auto", 2, {"batch_first": True}),
        (9, 4, 2, {"bias": False}),
    ]:
        module = make(kind, layers, bidirectional=bidirectional, **more)
        x = torch.randn((3, steps, 4) if module.batch_first else (steps, 3, 4), requires_grad=True)
        wrapper = wrap(module, x, limit, chunk)
        check_equal(module, wrapper, x, start(module, 3))
    check_equal(module, wrapper, x.detach())


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS[:3], ids=str)
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("kind", ["gru", "projected"])
def test_packed_sequences(kind, bidirectional, limit):
    for lengths, chunk in [((7, 7, 5, 2, 1), 3), ((2, 9, 4), 1), ((11, 11, 10), "auto")]:
        module = make(kind, 2, bidirectional=bidirectional)
        data = torch.randn(max(lengths), len(lengths), 4, requires_grad=True)
        packed = pack_padded_sequence(data, torch.tensor(lengths), enforce_sorted=False)
        if list(lengths) == sorted(lengths, reverse=True):
            packed = pack_padded_sequence(data, torch.tensor(lengths))
        packed = packed._replace(data=packed.data.detach().requires_grad_())
        wrapper = wrap(module, packed, limit, chunk)
        check_equal(module, wrapper, packed, start(module, len(lengths)))
        output, _ = wrapper(packed)
        assert isinstance(output, PackedSequence)
        assert output.sorted_indices is packed.sorted_indices
        assert output.batch_sizes is packed.batch_sizes


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("limit", [{}, {"slots": 2}, {"budget": "min"}], ids=str)
def test_lengths_of_padded_rows(limit, bidirectional, batch_first):
    module = make("lstm", 2, bidirectional=bidirectional, batch_first=batch_first)
    lengths = [4, 9, 1]
    x = torch.randn((3, 11, 4) if batch_first else (11, 3, 4), requires_grad=True)
    hx = start(module, 3)

    def plain():
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first, enforce_sorted=False)
        output, hidden = module(packed, hx)
        return pad_packed_sequence(output, batch_first, total_length=11)[0], hidden

    check_equal(
        module, Recurrent(module, chunk=3, **limit), x, hx, lengths=torch.tensor(lengths), plain=plain
    )
    assert Recurrent(module, **limit)(x, lengths=lengths)[0].shape[0 if batch_first else 1] == 3


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_one_sequence_without_a_batch(kind, batch_first):
    module = make(kind, 2, batch_first=batch_first, bidirectional=True)
    wrapper = Recurrent(module, slots=2, chunk=3)
    check_equal(module, wrapper, torch.randn(8, 4, requires_grad=True), start(module, None))
    check_equal(module, wrapper, torch.randn(8, 4))


def test_rows_are_reversed_and_reversed_back():
    sizes = torch.tensor([3, 3, 2, 2, 1])
    reversal = reversed_rows(sizes)
    assert torch.equal(reversal[reversal], torch.arange(11))
    data = torch.arange(11)
    padded, lengths = pad_packed_sequence(PackedSequence(data, sizes))
    reversed_ones, _ = pad_packed_sequence(PackedSequence(data[reversal], sizes))
    for row, length in enumerate(lengths):
        assert torch.equal(reversed_ones[:length, row], padded[:length, row].flip(0))


def test_one_block_and_nothing_dropped_is_bitwise_the_module():
    module = make("gru", 2)
    x = torch.randn(9, 3, 4)
    expected = differentiated(lambda: module(x), list(module.parameters()))
    wrapper = Recurrent(module, budget="1GiB", chunk=9)
    assert wrapper.plan(x).forward_count == 9
    for one, other in zip(
        differentiated(lambda: wrapper(x), list(module.parameters())), expected, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("frozen", "grad", "limit"),
    [(True, True, {"slots": 1}), (False, False, {"slots": 1}), (False, True, {})],
    ids=["frozen", "no_grad", "no_limit"],
)
def test_where_nothing_is_to_be_kept_the_module_itself_runs(frozen, grad, limit, monkeypatch):
    module = make("lstm", 2, dropout=0.5).requires_grad_(not frozen)
    x = torch.randn(6, 3, 4)
    calls = []
    monkeypatch.setattr(
        type(module), "__call__", lambda *given: calls.append(given) or nn.Module.__call__(*given)
    )
    with torch.set_grad_enabled(grad):
        torch.manual_seed(3)
        output, _ = Recurrent(module, **limit)(x)
        torch.manual_seed(3)
        assert torch.equal(output, module.forward(x)[0])
    assert len(calls) == 1


def test_frozen_weights_with_an_input_that_needs_gradients():
    module = make("lstm", 2).requires_grad_(False)
    module.weight_hh_l1.requires_grad_()
    check_equal(module, Recurrent(module, budget="min"), torch.randn(9, 3, 4, requires_grad=True))


@pytest.mark.slow
@pytest.mark.parametrize("bidirectional", [False, True], ids=["one_way", "both_ways"])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_drawn_again_as_it_was(bidirectional, packed):
    module = make("lstm", 3, dropout=0.4, bidirectional=bidirectional)
    data = torch.randn(10, 3, 4, requires_grad=True)
    found = []
    for limit in ({"budget": "1GiB"}, {"slots": 1}, {"slots": 2}, {"budget": "min"}):
        x = pack_padded_sequence(data, torch.tensor([10, 8, 3])) if packed else data
        torch.manual_seed(11)
        wrapper = Recurrent(module, chunk=3, **limit)
        found.append(differentiated(lambda w=wrapper, x=x: w(x), [*module.parameters(), data]))
        found[-1].append(torch.rand(3))
    for other in found[1:]:
        for one, same in zip(other, found[0], strict=True):
            torch.testing.assert_close(one, same, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found[0][0], leaves_of(module.eval()(x))[0])


def test_dropout_in_one_block_and_in_both_directions_is_that_of_the_module():
    for options in ({}, {"bidirectional": True}):
        module = make("gru", 3, dropout=0.4, **options)
        x = torch.randn(10, 3, 4)
        torch.manual_seed(5)
        expected, _ = module(x)
        torch.manual_seed(5)
        output, _ = Recurrent(module, slots=2, chunk=10 if not options else 3)(x)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        module.eval()
        check_equal(module, Recurrent(module, slots=2, chunk=3).eval(), x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
@pytest.mark.parametrize("layers", [1, 2])
def test_measured_bytes_are_the_predicted_ones(kind, layers):
    for steps, chunk, budget in [
        (1, "auto", "min"),
        (12, 1, "min"),
        (24, 4, "70%"),
        (24, 4, "100%"),
        (24, "auto", "50%"),
        (23, 4, "50%"),
    ]:
        module = make(kind, layers, hidden=24)  # so that the peak is in the backward, beside all gradients
        wrapper = Recurrent(module, chunk=chunk, budget=budget)
        x = torch.randn(steps, 6, 4, requires_grad=True)
        plan = wrapper.plan(x)
        for _ in range(2):  # while blocks are weighed, and when they have been
            held = loop_part(wrapper, x)
            assert held <= plan.peak <= plan.budget
            forward_is_larger = plan.sizes.run > plan.sizes.backward  # beside fewer gradients, then
            assert held == plan.peak or forward_is_larger or steps % plan.chunk, (steps, chunk, budget)
            wrapper = copy.deepcopy(wrapper)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gru", "projected"])
@pytest.mark.parametrize("layers", [1, 2])
def test_rows_that_end_stay_within_the_budget(kind, layers):
    steps = 12
    for lengths in ([steps] * 19 + [1], [steps] * 16 + [11, 4, 3, 2]):
        packed = pack_padded_sequence(torch.randn(steps, 20, 4), torch.tensor(lengths))
        packed = packed._replace(data=packed.data.requires_grad_())
        for chunk, budget in [(1, "min"), (1, "100%"), (4, "min"), (4, "100%"), ("auto", "50%")]:
            wrapper = Recurrent(make(kind, layers), chunk=chunk, budget=budget)
            assert loop_part(wrapper, packed) <= wrapper.plan(packed).peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_both_directions_share_the_budget(kind):
    x = torch.randn(24, 6, 4, requires_grad=False)
    module = make(kind, bidirectional=True)
    whole = sum(plan.keep_all for plan in Recurrent(module, chunk=2).plan(x))
    least = None
    try:
        Recurrent(module, budget=1, chunk=2).plan(x)
    except BudgetTooSmall as error:
        least = error.smallest
    for budget in (least, (least + whole) // 2, whole):
        wrapper = Recurrent(module, budget=budget, chunk=2)
        # The input asks for no gradient, which loop_part leaves room for.
        assert loop_part(wrapper, x) + size(x) <= budget
        assert len(wrapper.plan(x)) == 2


@pytest.mark.slow
def test_blocks_are_as_long_as_the_budget_allows():
    module = nn.LSTM(8, 16)
    x = torch.randn(400, 4, 8)
    plans = [Recurrent(module, budget=budget).plan(x) for budget in ("min", "2%", "5%", "20%", "90%")]
    chunks = [plan.chunk for plan in plans]
    assert chunks == sorted(chunks)
    assert chunks[0] == 1
    assert chunks[-2] >= 16
    assert all(plan.peak <= plan.budget for plan in plans)
    assert plans[2].runs_per_step < 3


def test_blocks_are_weighed_once_for_a_module(monkeypatch):
    module, x = make("lstm"), torch.randn(40, 3, 4)
    plan = Recurrent(module, budget="50%").plan(x)
    monkeypatch.setattr(Passage, "weighed", lambda *given: pytest.fail("weighed again"))
    again = Recurrent(module, budget="50%")
    assert again.plan(x) == plan
    again(x)[0].sum().backward()


def test_a_budget_below_the_floor_is_refused_and_changes_nothing():
    for options in ({}, {"bidirectional": True}):
        module = make("lstm", 2, dropout=0.3, **options)
        x = torch.randn(9, 3, 4, requires_grad=True)
        state = torch.get_rng_state()
        wrapper = Recurrent(module, budget=1000)
        with pytest.raises(BudgetTooSmall) as caught:
            wrapper(x)
        assert torch.equal(torch.get_rng_state(), state)
        assert x.grad is None
        assert all(parameter.grad is None for parameter in module.parameters())
        wrapper.budget = caught.value.smallest
        wrapper(x)
        wrapper.budget = caught.value.smallest - 1
        with pytest.raises(BudgetTooSmall):
            wrapper(x)


@pytest.mark.slow
def test_a_plan_draws_no_random_numbers_and_leaves_no_gradients():
    module = make("lstm", 2, dropout=0.3)
    x = torch.randn(9, 3, 4, requires_grad=True)
    state = torch.get_rng_state()
    for limit in ({"slots": 2}, {"budget": "min"}, {"budget": "1GiB"}, {}):
        with torch.no_grad():
            plan = Recurrent(module, **limit).plan(x, lengths=[9, 4, 5])
        assert plan.steps == 9
        assert plan.peak is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None
    assert module.weight_hh_l0.grad is None
    with pytest.raises(LowtideError, match="nothing here needs a gradient"):
        Recurrent(copy.deepcopy(module).requires_grad_(False), slots=1).plan(x.detach())


def test_parameters_are_the_modules_own():
    module = make("gru", 2, bidirectional=True)
    wrapper = Recurrent(module, slots=2)
    assert list(wrapper.state_dict()) == list(module.state_dict())
    assert [name for name, _ in wrapper.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert all(one is other for one, other in zip(wrapper.parameters(), module.parameters(), strict=True))
    outer = nn.Sequential(wrapper)
    assert list(outer.state_dict()) == [f"0.{name}" for name in module.state_dict()]
    other = make("gru", 2, bidirectional=True)
    wrapper.load_state_dict(other.state_dict())
    assert torch.equal(module.weight_hh_l1_reverse, other.weight_hh_l1_reverse)
    assert wrapper.hidden_size == 5
    assert (
        repr(wrapper)
        == "Recurrent(GRU(4, 5, num_layers=2, bidirectional=True), slots=2, chunk='auto', graphs='auto')"
    )


def test_moving_and_modes_reach_the_module():
    module = make("lstm", 2, dropout=0.5)
    wrapper = Recurrent(module, slots=2, chunk=2)
    outer = nn.Sequential(wrapper).float()
    assert module.weight_ih_l0.dtype == torch.float32
    assert wrapper(torch.randn(5, 2, 4, dtype=torch.float32))[0].dtype == torch.float32
    outer.double().eval()
    assert not module.training
    check_equal(module, wrapper, torch.randn(5, 2, 4))
    wrapper.train()
    assert module.training
    wrapper.dropout = 0.0
    assert module.dropout == 0.0
    check_equal(module, wrapper, torch.randn(5, 2, 4))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["copy", "pickle"]
)
def test_copies_stand_alone(again):
    wrapper = Recurrent(make("lstm", 2), slots=2, chunk=2)
    x = torch.randn(5, 2, 4)
    wrapper(x)
    twin = again(wrapper)
    assert twin.wrapped is not wrapper.wrapped
    assert twin.wrapped.weight_ih_l0 is twin.weight_ih_l0
    assert twin.weight_ih_l0 is not wrapper.weight_ih_l0
    twin.float().double()
    check_equal(twin.wrapped, twin, x)


@pytest.mark.parametrize("on", ["wrapper", "module"])
def test_parametrized_weights(on):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    module = make("gru", 2)
    wrapper = Recurrent(module, slots=2, chunk=2)
    parametrize.register_parametrization(wrapper if on == "wrapper" else module, "weight_hh_l1", Doubled())
    plain = make("gru", 2)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(getattr(wrapper, name))
    x = torch.randn(7, 3, 4)
    wrapper(x)[0].sum().backward()
    plain(x)[0].sum().backward()
    original = wrapper.parametrizations.weight_hh_l1.original
    torch.testing.assert_close(original.grad, 2 * plain.weight_hh_l1.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wrapper.weight_ih_l0.grad, plain.weight_ih_l0.grad, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert torch.equal(wrapper(x)[0], plain(x)[0])


def test_replaced_weights_are_the_ones_that_run():
    module = make("lstm")
    wrapper = Recurrent(module, slots=2, chunk=2)
    x = torch.randn(5, 2, 4)
    wrapper(x)
    wrapper.weight_ih_l0 = nn.Parameter(torch.randn(20, 4))
    check_equal(module, wrapper, x)
    module.bias_hh_l0 = nn.Parameter(torch.randn(20))
    check_equal(module, wrapper, x)
    swapped = {name: torch.randn_like(value) for name, value in wrapper.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(module, swapped, x)[0]
    found = torch.func.functional_call(wrapper, {n: v.requires_grad_() for n, v in swapped.items()}, x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_accumulate_and_hooks_see_whole_gradients():
    module = make("lstm")
    wrapper = Recurrent(module, slots=2, chunk=2)
    x = torch.randn(7, 2, 4)
    seen = []
    module.weight_hh_l0.register_hook(seen.append)
    for _ in range(2):
        wrapper(x)[0].sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(module.weight_hh_l0.grad, 2 * seen[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_weights_in_one_piece_hand_gradients_on(kind, monkeypatch):
    """Stands in for a GPU: cuDNN's layout is not there, but all copies are made and differentiated."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: True)
    state = torch.get_rng_state()
    for options in ({"bidirectional": kind != "relu"}, {"bias": False}):
        module = make(kind, 2, **options)
        torch.set_rng_state(state)
        x = torch.ones(7, 3, 4)
        check_equal(module, Recurrent(module, slots=2, chunk=2), x)
        check_equal(module, Recurrent(module, budget="min", chunk=2), x)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_single_precision_takes_the_same_way():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("lstm", "gru"):
            module = make(kind, 2, bidirectional=True).float()
            x = torch.randn(9, 3, 4, dtype=torch.float32)
            packed = pack_padded_sequence(x, torch.tensor([9, 5, 2]))
            for given in (x, packed):
                wrapper = Recurrent(module, budget="80%", chunk=2)
                wanted = list(module.parameters())
                expected = differentiated(lambda m=module, g=given: m(g), wanted)
                for one, other in zip(
                    differentiated(lambda w=wrapper, g=given: w(g), wanted), expected, strict=True
                ):
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("x", "hx"),
    [
        (torch.zeros(5, 2, 3), None),
        (torch.zeros(5, 2, 2, 4), None),
        (torch.zeros(0, 2, 4), None),
        (torch.zeros(5, 2, 4, dtype=torch.float32), None),
        (torch.zeros(5, 2, 4, dtype=torch.float64), (torch.zeros(1, 3, 5), torch.zeros(1, 3, 5))),
        (torch.zeros(5, 2, 4, dtype=torch.float64), (torch.zeros(1, 5), torch.zeros(1, 5))),
        (torch.zeros(5, 4, dtype=torch.float64), (torch.zeros(1, 1, 5), torch.zeros(1, 1, 5))),
    ],
    ids=["width", "dimensions", "empty", "dtype", "rows", "flat_hx", "batched_hx"],
)
def test_wrong_inputs_get_the_modules_own_errors(x, hx):
    module = make("lstm")
    with pytest.raises((RuntimeError, ValueError)) as own:
        module(x, hx)
    with pytest.raises(type(own.value)) as caught:
        Recurrent(module, slots=2)(x, hx)
    assert str(caught.value) == str(own.value)


def test_refusals():
    module = make("lstm")
    x = torch.randn(5, 2, 4)
    for lengths in ([5], [5, 6], [5, 0], [5.0, 2.0], [[5, 2]]):
        with pytest.raises(LowtideError, match="lengths"):
            Recurrent(module, slots=2)(x, lengths=torch.tensor(lengths))
    with pytest.raises(LowtideError, match="padded batch"):
        Recurrent(module)(x[:, 0], lengths=[5])
    for wrong in (
        {"budget": "1GiB", "slots": 2},
        {"slots": 0},
        {"chunk": 0},
        {"chunk": "long"},
        {"budget": "much"},
    ):
        with pytest.raises(LowtideError):
            Recurrent(module, **wrong)
    with pytest.raises(LowtideError, match="LSTMCell"):
        Recurrent(nn.LSTMCell(4, 5))
    module.register_forward_hook(lambda *given: None)
    with pytest.raises(LowtideError, match="hooks"):
        Recurrent(module, slots=2)(x)
