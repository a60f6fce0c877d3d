"""What `sketch`, `unsketch` and `noise` refuse, what they say, and that nothing was changed by then."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide import LowtideError
from sketched import WIDTH, Block, WithLoss


def untouched(model):
    return not any("forward" in vars(part) or part._forward_pre_hooks for part in model.modules())


@pytest.fixture
def model():
    return WithLoss(Block())


@pytest.fixture
def x():
    return torch.randn(4, 10, WIDTH)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 0}, "rate=0 must be above 0: the share of the rows to keep"),
        ({"rate": -0.1}, "rate=-0.1 must be above 0"),
        ({"rate": "0.2"}, "rate='0.2' must be above 0"),
        ({"rate": True}, "rate=True must be above 0"),
        ({"rate": float("nan")}, "rate=nan must be above 0"),
        ({"rate": float("inf")}, "rate=inf must be above 0"),
        ({"kind": "stride"}, "kind='stride' is not known; choose one of strided, rows, rows_by_norm"),
        ({"kind": None}, "kind=None is not known"),
        ({"kind": "int8", "rate": 0.5}, "kind='int8' keeps every row, in fewer bits, and takes no rate"),
        ({"kind": "int4", "rows": "mask"}, "rows= has no use with kind='int4'"),
        ({"layers": "net.mpl.0"}, r"no module is called 'net.mpl.0'; there are net.mlp.0"),
        ({"layers": ["net.mlp", "nat.*"]}, r"no module is called 'nat.\*'; there are"),
        ({"layers": "net.mlp.1"}, "'net.mlp.1' has no nn.Linear in it"),
        ({"layers": [3]}, "layers= takes names, patterns or a function, not 3"),
        ({"layers": 3}, "layers= takes names, patterns or a function, not 3"),
        ({"layers": lambda name, layer: False}, "layers= left none of the 6 layers"),
        ({"layers": []}, "layers= left none of the 6 layers"),
        ({"rows": "attention_mask"}, "no argument 'attention_mask' for rows=; it has x, mask"),
        ({"rows": torch.ones(3)}, "rows= takes the name of the model's argument"),
        ({"max_noise": 1.0}, "max_noise= needs a batch to measure on"),
        ({"max_noise": -1.0, "batch": (1,)}, "max_noise=-1.0 must be a number above 0"),
        ({"max_noise": 1.0, "batch": torch.ones(3)}, "batch= takes a tuple"),
        ({"batch": (1,)}, "a batch is for max_noise="),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_bad_options(model, options, words):
    with pytest.raises(LowtideError, match=words):
        lowtide.sketch(model, **options)
    assert untouched(model)


def test_models_with_nothing_to_sketch(model):
    for empty in (nn.Sequential(), nn.Conv2d(3, 3, 1)):
        with pytest.raises(LowtideError, match=r"has no nn\.Linear in it"):
            lowtide.sketch(empty)
    with pytest.raises(LowtideError, match="sketch takes a module, not a function"):
        lowtide.sketch(lambda x: x)
    model.requires_grad_(False)
    with pytest.raises(LowtideError, match=r"none of the 6 nn.Linear can be sketched: '.*' is frozen"):
        lowtide.sketch(model)


class Own(nn.Linear):
    def forward(self, input):  # noqa: A002  # nn.Linear's
        return super().forward(input) * 2


def test_layers_that_cannot_be_sketched():
    model = nn.ModuleDict(
        {
            "own": Own(4, 4),
            "lazy": nn.LazyLinear(4),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "complex": nn.Linear(4, 4, dtype=torch.complex64),
            "attention": nn.MultiheadAttention(4, 2),
            "good": nn.Linear(4, 4),
        }
    )
    for name, words in (
        ("own", "'own' cannot be sketched: it has a forward of its own"),
        ("lazy", "has no weight yet; run the model once before"),
        ("frozen", "is frozen, and so keeps nothing of its input"),
        ("complex", "has a weight of torch.complex64"),
        ("attention", "'attention.out_proj' cannot be sketched: it is not called by nn.MultiheadAttention"),
    ):
        with pytest.raises(LowtideError, match=words):
            lowtide.sketch(model, layers=name)
    assert not any("forward" in vars(part) for part in model.modules())
    lowtide.sketch(model)
    assert [name for name, part in model.named_modules() if "forward" in vars(part)] == ["good"]


def test_layers_by_name_pattern_parent_and_function():
    def sketched(layers):
        model = lowtide.sketch(WithLoss(Block()), layers=layers)
        return [name for name, part in model.named_modules() if "forward" in vars(part)]

    assert sketched("net.mlp.0") == ["net.mlp.0"]
    assert sketched("net.mlp") == ["net.mlp.0", "net.mlp.3"]
    assert sketched("*.attention.[qk]*") == ["net.attention.query", "net.attention.key"]
    assert sketched(["net.mlp.3", "*.out"]) == ["net.attention.out", "net.mlp.3"]
    assert sketched(lambda name, layer: layer.in_features > WIDTH) == ["net.mlp.3"]
    assert len(sketched("")) == 6


def test_twice_and_never(model):
    with pytest.raises(LowtideError, match="no layer of this model is sketched"):
        lowtide.unsketch(model)
    lowtide.sketch(model, layers="net.mlp.0")
    with pytest.raises(LowtideError, match=r"'net\.mlp\.0' is sketched already; lowtide\.unsketch"):
        lowtide.sketch(model)
    with pytest.raises(LowtideError, match=r"'mlp\.0' is sketched already"):
        lowtide.sketch(model.net, 0.5, layers="mlp")
    lowtide.sketch(model, 0.5, layers="net.mlp.3")
    rates = [layer.choice.rate for layer in lowtide.noise(model, torch.randn(4, 10, WIDTH)).layers]
    assert rates == [0.2, 0.5]
    lowtide.unsketch(model)
    assert untouched(model)


def test_a_model_that_is_a_layer():
    layer = nn.Linear(WIDTH, 8)
    lowtide.sketch(layer)
    with pytest.raises(LowtideError, match=r"'\(the model\)' is sketched already"):
        lowtide.sketch(layer)
    assert untouched(lowtide.unsketch(layer))


def test_models_that_are_capped_or_compiled(model, x):
    lowtide.cap(model, "1GiB")
    for call in (lowtide.sketch, lowtide.unsketch, lambda model: lowtide.noise(model, x)):
        with pytest.raises(LowtideError, match="the model is capped or compiled already; undo that"):
            call(model)
    lowtide.uncap(model)
    model.net.mlp.compile()
    with pytest.raises(LowtideError, match=r"'net.mlp' is capped or compiled already"):
        lowtide.sketch(model)
    model.net.mlp._compiled_call_impl = None
    with pytest.raises(LowtideError, match=r"wrapped by torch\.compile; sketch it first"):
        lowtide.sketch(torch.compile(model))
    assert untouched(model)


def test_a_mask_that_is_none(model, x):
    lowtide.sketch(model, rows=lambda x, mask=None: [1, 2])
    with pytest.raises(LowtideError, match="rows= gave a list where a mask was expected"):
        model(x)


def test_noise_refuses(model, x):
    with pytest.raises(LowtideError, match="at=0 must be a number above 0"):
        lowtide.noise(model, x, at=0)
    with pytest.raises(LowtideError, match="rate=0 must be above 0"):
        lowtide.noise(model, x, rate=0)
    with pytest.raises(lowtide.NothingToTrain):
        lowtide.noise(nn.Sequential(nn.Linear(WIDTH, 8), Detach()), x)
    assert untouched(model)
    lowtide.sketch(model)
    with pytest.raises(LowtideError, match="this model is sketched, and noise tells about its own sketches"):
        lowtide.noise(model, x, rate=0.5)


class Detach(nn.Module):
    def forward(self, x):
        return x.detach()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.used(x).sum()


def test_noise_of_a_layer_that_gets_no_gradient(x):
    with pytest.raises(LowtideError, match="no layer that is to be sketched got a gradient"):
        lowtide.noise(Both(), x, layers="unused")
    with pytest.raises(LowtideError, match="no layer that is to be sketched got a gradient"):
        lowtide.noise(Both(), x[:0])
