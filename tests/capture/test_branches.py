"""Branches on the data of a batch: taken as plain PyTorch takes them, asked at every call, or refused."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide._torch import private
from lowtide.entry.in_place import capped_of
from small_models import gradients, same

QUICKLY = {"method": "keep_all", "prices": "roofline"}


class Branching(nn.Module):
    """A layer, whose output `way` changes as the batch says."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x, mask):
        return self.way(self, self.layer(x), x, mask).square().sum()


def attention(model, y, x, mask):
    q = y[:, None]
    if mask.all():
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, None, None] != 0)


def of_a_buffer(model, y, x, mask):
    twice = y * 2 if model.count % 2 == 0 else y * 3
    model.count += 1
    return twice


def as_a_value(model, y, x, mask):
    return y * (mask.all() or mask.sum()) + y * (mask.any() and mask[:, -1].sum())


def in_a_loop(model, y, x, mask):
    while mask.sum() > 5:
        mask, y = mask[:, :-1], y * 1.5
    return y


def of_floats_compared(model, y, x, mask):
    if torch.isnan(x).any():
        raise ValueError("the batch is not a number")
    return y


def of_a_mask_of_floats(model, y, x, mask):
    hidden = ((1.0 - mask[:, None].to(x.dtype)) * -1e4)[:, 0]
    return y * 2 if (hidden < 0).flatten().any() else y


def of_a_copy_that_is_written(model, y, x, mask):
    shown = mask.clone()
    if shown[1, 3]:  # a view of what is written afterwards
        y = y * 2
    shown[:, 2:] = 1 - shown[:, 2:]
    shown |= mask[:, :1] - 1
    y = y * 3 if shown.all() else y
    return y if shown.fill_(0).any() else y * 5


def as_a_flag(model, y, x, mask):
    whole, some = bool((mask == 1).all()), mask.any().item()
    return y * 2 if whole and not (some and mask[0, 0].item() is False) else y * 3


def ones():
    return torch.ones(2, 4, dtype=torch.long)


def padded():
    mask = ones()
    mask[1, 2:] = 0
    return mask


@pytest.mark.parametrize(
    ("way", "entries"),
    [
        (attention, 2),
        (of_a_buffer, 2),
        pytest.param(as_a_value, 2, marks=pytest.mark.slow),
        pytest.param(as_a_flag, 2, marks=pytest.mark.slow),
        pytest.param(in_a_loop, 2, marks=pytest.mark.slow),
        (of_floats_compared, 1),
        pytest.param(of_a_mask_of_floats, 2, marks=pytest.mark.slow),
        (of_a_copy_that_is_written, 2),
    ],
)
def test_each_batch_goes_its_own_way(way, entries):
    torch.manual_seed(0)
    plain = Branching(way)
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", **QUICKLY)
    for mask in (ones(), padded(), ones(), padded()):
        x, expected = torch.randn(2, 4, 8), []
        for each in (plain, model):
            each.zero_grad()
            each(x, mask.clone()).backward()
            expected.append([*gradients(each), each.count.clone()])
        assert same(*expected)
    assert len(capped_of(model).entries) == entries


def test_what_only_one_batch_meets_is_met_then():
    model = lowtide.cap(Branching(of_floats_compared), "1MiB", **QUICKLY)
    model(torch.ones(2, 4, 8), ones()).backward()
    with pytest.raises(ValueError, match="the batch is not a number"):
        model(torch.full((2, 4, 8), torch.nan), ones())
    model(torch.ones(2, 4, 8), ones()).backward()


def of_parameters(model, y, x, mask):
    return y * 2 if (model.layer.weight > 0).all() else y


def of_an_activation(model, y, x, mask):
    return y * 2 if (y > 0).all() else y


def of_float_sums(model, y, x, mask):
    return y * 2 if x.sum() > 0 else y


def of_random_numbers(model, y, x, mask):
    return y * 2 if torch.randint(0, 2, ()) == 0 else y


def of_what_was_written(model, y, x, mask):
    mask[0, 0] = 0
    return y * 2 if mask.all() else y


def of_a_copy_with_activations(model, y, x, mask):
    shown = mask.clone()
    shown[0] = (y[0, :, 0] > 0).long()
    return y * 2 if shown.all() else y


def of_what_is_written_in_another_way(model, y, x, mask):
    shown = mask.clone()
    torch.neg(y.detach()[..., 0].long(), out=shown)
    return y * 2 if shown.all() else y


def of_a_buffer_that_was_written(model, y, x, mask):
    model.count += 1
    return y * 2 if model.count == 1 else y


@pytest.mark.parametrize(
    "way",
    [
        *(of_parameters, of_an_activation, of_float_sums, of_random_numbers),
        *(of_what_was_written, of_a_buffer_that_was_written),
        *(of_a_copy_with_activations, of_what_is_written_in_another_way),
    ],
)
def test_what_may_be_another_before_the_step_is_refused(way):
    model = lowtide.cap(Branching(way), "1MiB", **QUICKLY)
    mask, before = ones(), torch.get_rng_state()
    with pytest.raises(lowtide.GraphBreak, match=r"data-dependent branching: .* whole numbers"):
        model(torch.ones(2, 4, 8), mask)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(mask, ones())
    assert model.count == 0


def test_inputs_that_share_memory_with_one_that_is_written_are_not_asked():
    def way(model, y, x, mask):
        x[0, 0, 0] = 1
        return y * 2 if mask.all() else y

    model = lowtide.cap(Branching(way), "1MiB", **QUICKLY)
    x = torch.ones(2, 4, 8)
    with pytest.raises(lowtide.GraphBreak, match="data-dependent branching"):
        model(x, x[0, :, 0].view(torch.int32))


def test_an_assertion_holds_or_is_raised():
    names = {}
    exec("def way(model, y, x, mask):\n    assert mask.any()\n    return y", names)  # pytest rewrites its own
    model = lowtide.cap(Branching(names["way"]), "1MiB", **QUICKLY)
    model(torch.ones(2, 4, 8), ones()).backward()
    with pytest.raises(AssertionError):
        model(torch.ones(2, 4, 8), 0 * ones())


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


def test_several_conditions_are_one_look_at_the_device_per_call():
    def way(model, y, x, mask):
        return y * 2 if mask.all() and mask[:, :2].all() and mask.sum() > 1 else y

    model = lowtide.cap(Branching(way), "1MiB", **QUICKLY)
    for _ in range(2):
        with Log() as log:
            model(torch.ones(2, 4, 8), ones()).backward()
    assert [name for name in log.seen if "scalar_dense" in name] == []  # `tolist` of them all
    assert log.seen.count("aten.all.default") == 2


@pytest.mark.slow
def test_pieces_of_a_step_break_at_the_branch_as_before():
    model = lowtide.cap(Branching(attention), "1MiB", allow_breaks=True, **QUICKLY)
    plain = copy.deepcopy(model)
    for mask in (ones(), padded()):
        for each in (plain, model):
            each.zero_grad()
            each(torch.ones(2, 4, 8), mask).backward()
        assert same(gradients(plain), gradients(model))


def test_a_plan_is_of_the_batch_that_it_is_made_for():
    def kinds(plan):
        return {op.target for op in plan.graph.ops}

    model = Branching(attention)
    whole, part = (lowtide.plan(model, torch.ones(2, 4, 8), mask) for mask in (ones(), padded()))
    assert "aten.ne.Scalar" not in kinds(whole)
    assert "aten.ne.Scalar" in kinds(part)
    assert whole.notes == part.notes == ()
    with pytest.raises(lowtide.GraphBreak, match="data-dependent branching"):
        lowtide.plan(model, torch.ones(2, 4, 8, device="meta"), ones().to("meta"))


def test_a_plan_that_was_handed_in_is_for_such_data_alone():
    plan = lowtide.plan(Branching(attention), torch.ones(2, 4, 8), ones(), budget="1MiB")
    model = lowtide.cap(Branching(attention), plan=plan)
    model(torch.ones(2, 4, 8), ones()).backward()
    with pytest.raises(lowtide.PlanMismatch) as found:
        model(torch.ones(2, 4, 8), padded())
    assert "of other data" in found.value.__notes__[0]


def test_torch_is_as_it_was_after_a_call():
    tracer = private("Tracer")
    before = tracer.dispatch_table
    model = lowtide.cap(Branching(attention), "1MiB", **QUICKLY)
    model(torch.ones(2, 4, 8), ones()).backward()
    assert tracer.dispatch_table is before
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)) == 2


def test_a_condition_keeps_no_batch_alive():
    model = lowtide.cap(Branching(attention), "1MiB", **QUICKLY)
    mask = ones()
    model(torch.ones(2, 4, 8), mask).backward()
    gc.collect()
    assert not [o for o in gc.get_referrers(mask) if isinstance(o, dict) and o is not globals()]


def test_a_gradient_that_a_model_asks_for_and_nobody_gets_changes_nothing():
    class ForCheckpointing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv1d(1, 4, 3), nn.Linear(6, 2)

        def forward(self, x):
            hidden = x[:, None]
            hidden.requires_grad = True
            return self.last(self.first(hidden).tanh()).square().sum()

    found = lowtide.verify(ForCheckpointing(), torch.randn(2, 8), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.slow
def test_torchs_transformer_asks_whether_its_mask_is_causal():
    class Sequences(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)

        def forward(self, x, mask, padding):
            return self.net(x, x, tgt_mask=mask, src_key_padding_mask=padding).square().mean()

    torch.manual_seed(0)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    for mask in (causal, causal.flip(0).flip(1)):
        found = lowtide.verify(Sequences(), torch.randn(2, 4, 8), mask, padding, budget="min")
        assert found, str(found)
        assert found.predicted == found.measured


def test_warnings_of_a_step_are_left_out():
    def step(x):
        warnings.warn("a road that is deprecated", FutureWarning, stacklevel=2)
        return x.square().sum()

    lowtide.cap(step, "1MiB", **QUICKLY)(torch.ones(4, requires_grad=True)).backward()
