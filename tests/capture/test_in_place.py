"""Ops that may overwrite what they read: which they are, and that no bit of their results changes."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.in_place import form_of
from operator_samples import arguments, overloads, same_bits

aten = torch.ops.aten

SOME = {
    *(aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.neg.default, aten.where.self),
    *(aten.relu.default, aten.gelu.default, aten.silu.default, aten.tanh.default, aten.sigmoid.default),
    *(aten.threshold_backward.default, aten.gelu_backward.default, aten.silu_backward.default),
    *(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.leaky_relu_backward.default),
    *(aten._softmax.default, aten._log_softmax.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    *(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, aten.pow.Tensor_Scalar),
    *(aten.rsqrt.default, aten.scatter_add.default, aten.hardtanh_backward.default, aten.clamp.default),
}


FORMS = [(target, form) for target in overloads() if (form := form_of(target, "cpu")) is not None]


def overwritten(form, args, kwargs, place):
    """What the form returns that writes into a copy of one of the arguments."""
    args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    into = {} if form.keyword is None else {form.keyword: args[place]}
    result = form.target(*args, **kwargs, **into)
    assert result is args[place]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_no_bit_changes_when_an_argument_is_overwritten(dtype):
    torch.manual_seed(0)
    tried = set()
    for target, form in FORMS:
        try:
            args, kwargs = arguments(target, dtype)
            result = target(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            continue  # not of this type
        first_only = form.keyword is None or "scatter" in str(target)
        for place, arg in enumerate(args[:1] if first_only else args):
            if isinstance(arg, torch.Tensor) and (arg.shape, arg.dtype) == (result.shape, result.dtype):
                assert same_bits(overwritten(form, args, kwargs, place), result), (target, place)
                tried.add(target)
    if dtype in (torch.float32, torch.bfloat16):
        assert len(tried) > 80
        assert tried >= SOME - ({aten.scatter.value} if dtype == torch.bfloat16 else set())


@pytest.mark.parametrize("size", [1, 33, 1000, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_rows_of_a_softmax_may_be_overwritten_whatever_their_length(size, dtype, dim):
    torch.manual_seed(0)
    x, gradient = torch.randn(2, 3, size).to(dtype), torch.randn(2, 3, size).to(dtype)
    for forward, backward in (
        (aten._softmax.default, aten._softmax_backward_data.default),
        (aten._log_softmax.default, aten._log_softmax_backward_data.default),
    ):
        result = forward(x, dim, False)
        assert same_bits(overwritten(form_of(forward, "cpu"), [x, dim, False], {}, 0), result)
        args = [gradient, result, dim, dtype]
        for place in (0, 1):
            expected = backward(*args)
            assert same_bits(overwritten(form_of(backward, "cpu"), args, {}, place), expected)


@pytest.mark.parametrize(
    "target",
    [
        aten.clone.default,  # these have an `out=` that torch generates: it computes a new tensor first
        aten.native_dropout_backward.default,
        aten.mul.Scalar,
        aten.hardswish_backward.default,
        aten._to_copy.default,
        aten.mm.default,  # these read an element after they have written others
        aten.cumsum.default,
        aten.sum.dim_IntList,
        aten.bernoulli.default,  # these draw numbers
        aten.native_dropout.default,
        torch.relu,
    ],
)
def test_operators_that_may_not(target):
    assert form_of(target, "cpu") is None


def test_without_cuda_its_kernels_are_taken_to_be_those_of_the_cpu():
    if not torch.cuda.is_available():
        assert form_of(aten.mul.Tensor, "cuda") == form_of(aten.mul.Tensor, "cpu")
    assert form_of(aten.native_dropout_backward.default, "cuda") is None


class Once(nn.Module):
    """A function of a hidden value, and of whatever is given to it."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.rand(8, 8) + 0.5), function

    def forward(self, *args):
        return self.function(args[0] @ self.weight, *args[1:]).sum()


def forward_takes(function, *args):
    """What forward ops of a step take, by the operator's name."""
    graph = lowtide.plan(Once(function), *args).graph
    made = {op.writes[0]: op.target for op in graph.ops if op.writes}
    return {
        op.target.split(".")[1]: [made.get(name, name).split(".")[1] for name in op.takes]
        for op in graph.ops
        if op.phase == "forward" and op.takes
    }


SQUARE = torch.rand(8, 8)


def test_what_may_be_overwritten_lies_as_the_result_does():
    assert forward_takes(lambda h: h.exp(), SQUARE) == {"exp": ["mm"]}
    assert forward_takes(lambda h: h.view(4, 16).exp(), SQUARE) == {"exp": ["mm"]}
    assert forward_takes(lambda h: h * h, SQUARE) == {"mul": ["mm"]}
    assert forward_takes(lambda h: h.t() + 1, SQUARE) == {"add": ["mm"]}  # the sum is transposed, too
    assert forward_takes(lambda h: h + torch.ones(3, 8, 8), SQUARE) == {"add": ["ones"]}  # h is broadcast
    assert forward_takes(lambda h: h[:4].exp(), SQUARE) == {}  # not all of it
    assert forward_takes(lambda h: h.double() * 2, SQUARE) == {"mul": ["_to_copy"]}
    assert forward_takes(lambda h: h * (h > 0.5), SQUARE) == {"mul": ["mm"]}  # a mask is of another size
    assert forward_takes(lambda h: h * torch.eye(8)[0, 0], SQUARE)["mul"] == ["mm"]


def test_what_an_op_reads_in_two_ways_is_not_overwritten():
    assert forward_takes(lambda h: h * h.t(), SQUARE) == {}
    assert forward_takes(lambda h: h - h[:, :1], SQUARE) == {}
    assert forward_takes(lambda h: h.exp() * h[:, :1], SQUARE) == {"exp": ["mm"], "mul": ["exp"]}


def test_what_others_may_see_is_never_overwritten():
    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8, 8))
            self.register_buffer("scale", torch.rand(8, 8))

        def forward(self, x):
            h = x.sin() * self.scale * self.weight
            return h.cos(), h

    graph = lowtide.plan(Seen(), SQUARE, differentiate="all").graph
    for op in graph.ops:
        for name in op.takes:
            assert graph.value[name].kind == "activation"
            assert not graph.value[name].held
    assert any(op.takes for op in graph.ops)
    assert not graph.plain_in_place
