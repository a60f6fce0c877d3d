"""The corpus: its registry, its files, and that its networks are what their papers say."""

import json

import pytest
import torch

import corpus
import encoders
import language
import lowtide
import recurrent
import segmentation
import vision
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from networks import Network

SEVEN = ["pspnet", "unet", "resnet50", "resnet152", "vgg19", "densenet161", "googlenet"]
MODELS = [
    "gpt2_medium",
    "llama_1b",
    "vit_b16",
    "bert_base",
    "t5_small",
    "mamba",
    "moe",
    "lstm200",
    "gpt_deep",
]


def test_names():
    assert corpus.names()[:7] == SEVEN == list(corpus.PAPER)
    assert set(MODELS) < set(corpus.names())


def test_paper_percentages_follow_from_its_gigabytes():
    for row in corpus.PAPER.values():
        assert abs(100 * (1 - row.best / row.vanilla) - row.best_saved) < 1
        assert abs(100 * (1 - row.chen / row.vanilla) - row.chen_saved) < 1.5


def test_unknown_name_is_refused(tmp_path, capsys):
    with pytest.raises(lowtide.LowtideError, match="no network 'resnet51'; it has pspnet"):
        corpus.load("resnet51", folder=tmp_path)
    with pytest.raises(SystemExit) as stop:
        corpus.main(["--only", "resnet51", "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert "no network 'resnet51'" in capsys.readouterr().err


def test_list_captures_nothing(tmp_path, capsys):
    corpus.main(["--list", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == corpus.names()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small(monkeypatch):
    """A corpus of one small network, and a list that grows whenever it is built."""
    built = []

    def build():
        built.append("small")
        model = vision.Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5)))
        return model, (torch.empty(4, 3, 2, 2), torch.empty(4, dtype=torch.long))

    monkeypatch.setitem(corpus.CORPUS, "small", Network("4 x 2²", build))
    return built


def test_file_is_reused_unless_asked_again(small, tmp_path):
    first = corpus.load("small", folder=tmp_path / "graphs")
    assert corpus.load("small", folder=tmp_path / "graphs") == first
    assert len(small) == 1
    assert corpus.load("small", folder=tmp_path / "graphs", again=True) == first
    assert len(small) == 2
    assert sorted(path.name for path in (tmp_path / "graphs").iterdir()) == ["captures.jsonl", "small.json"]


def test_what_a_file_says_is_what_is_loaded(small, tmp_path):
    other = corpus.scaled(50)
    (tmp_path / "small.json").write_text(other.to_json())
    assert corpus.load("small", folder=tmp_path) == other
    assert not small


def test_table(small, tmp_path, capsys):
    for _ in range(2):
        corpus.main(["--only", "small", "--out", str(tmp_path)])
    head, line, *second = capsys.readouterr().out.splitlines()
    assert second == [head, line]
    graph = corpus.load("small", folder=tmp_path)
    forward = sum(op.phase == "forward" for op in graph.ops)
    counts = f"0.0 {len(graph.ops)} {forward} {len(graph.ops) - forward}"
    assert line.split()[:8] == f"small 4 x 2² {counts}".split()
    noted = json.loads((tmp_path / "captures.jsonl").read_text())
    assert noted["parameters"] == 12 * 5 + 5
    assert float(line.split()[-1]) == pytest.approx(noted["capture_seconds"], abs=0.06)


@pytest.mark.slow
def test_captured_step_is_priced_for_an_h200(tmp_path):
    graph = corpus.load("unet", folder=tmp_path)
    assert graph.device == "H200"
    assert graph.prices == "roofline of H200"
    assert sum(op.kind == "random" for op in graph.ops) == 1
    assert 6e9 < simulate(graph, keep_all(graph)).peak < 7e9
    assert 0.01 < graph.seconds < 0.1


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet50", 25_557_032),
        ("resnet152", 60_192_808),
        ("vgg19", 143_667_240),
        ("densenet161", 28_681_000),
        ("vit_b16", 86_567_656),
        ("unet", 31_030_658),
        ("gpt2_medium", 354_823_168),
        ("bert_base", 109_514_298),
        ("t5_small", 60_506_624),
        ("llama_1b", 1_235_814_400),
        ("mamba", 128_989_632),
    ],
)
def test_parameters_are_those_of_the_published_network(name, count):
    with torch.device("meta"):
        model, batch = corpus.CORPUS[name].build()
    assert parameters(model) == count
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *batch))


@pytest.mark.slow
def test_parameters_that_papers_round():
    with torch.device("meta"):
        googlenet, pspnet = vision.GoogLeNet(), segmentation.PSPNet(19)
    assert parameters(googlenet) == 13_378_280
    assert parameters(googlenet) - parameters(googlenet.sides) == 6_998_552
    assert round(parameters(pspnet) / 1e6, 2) == 68.07


def ids(count, length=16):
    return encoders.token_batches(count, 2, length, 50, "cpu")


SMALL = {
    "gpt": lambda: (language.GPT(2, 64, 50, 16, dropout=0.1, tied=True), ids(2)),
    "llama": lambda: (language.Llama(2, 64, 50, heads=8, groups=2, hidden=96).float(), ids(2)),
    "moe": lambda: (language.moe(2, 64, 50, 16, experts=4).float(), ids(2)),
    "bert": lambda: (encoders.Bert(2, 64, 50, 16), (*ids(1), torch.ones(2, 16, dtype=torch.long), *ids(1))),
    "t5": lambda: (encoders.T5(2, 64, 50), ids(3)),
    "mamba": lambda: (recurrent.Mamba(2, 64, 50), ids(2, 512)),
    "lstm": lambda: (recurrent.LSTM(32, 50), ids(2)),
    "pspnet": lambda: (
        segmentation.PSPNet(5, (1, 1, 1, 1)),
        segmentation.scenes(2, "cpu", side=65, classes=5),
    ),
    "unet": lambda: (
        segmentation.UNet(width=4, depth=2),
        (torch.randn(1, 1, 60, 60), torch.randint(2, (1, 20, 20))),
    ),
    "googlenet": lambda: (vision.GoogLeNet(), vision.images(1, "cpu")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_finite_gradient(name):
    model, batch = SMALL[name]()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    loss = model(*batch)
    loss.backward()
    assert loss.isfinite()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


def test_chunked_scan_is_the_recurrence():
    batch, length, heads, head, states = 2, 12, 8, 16, 4
    mixer = recurrent.SelectiveScan(64, states=states, head=head, chunk=4)
    values, decay = torch.randn(batch, heads, length, head), -torch.rand(batch, heads, length)
    write, read = torch.randn(2, batch, length, states)
    state, expected = torch.zeros(batch, heads, states, head), []
    for t in range(length):
        new = write[:, None, t, :, None] * values[:, :, t, None]
        state = state * decay[:, :, t, None, None].exp() + new
        expected.append((read[:, None, t, None] @ state).squeeze(2))
    torch.testing.assert_close(mixer.scan(values, decay, write, read), torch.stack(expected, 2))


@pytest.mark.parametrize("capacity", [2, 6])
def test_experts_take_their_first_tokens(capacity):
    experts, tokens = 4, 6
    layer = language.Experts(8, 16, experts)
    gates = torch.rand(2, tokens, experts).softmax(-1)
    weight, chosen = gates.topk(2, -1)
    expected = torch.zeros(2, tokens, experts, capacity)
    for row in range(2):
        queued = [0] * experts
        for choice in range(2):
            for token in range(tokens):
                expert = int(chosen[row, token, choice])
                if queued[expert] < capacity:
                    share = weight[row, token, choice] / weight[row, token].sum()
                    expected[row, token, expert, queued[expert]] = share
                queued[expert] += 1
    torch.testing.assert_close(layer.places(gates, capacity), expected)


@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("ops", [1, 1000, 5000])
def test_scaled_has_as_many_ops_as_asked(ops, alike):
    graph = corpus.scaled(ops, alike=alike)
    assert ops <= len(graph.ops) < ops + 30
    assert graph == corpus.scaled(ops, alike=alike)
    gradients = [value for value in graph.values if value.kind == "gradient"]
    assert len(gradients) == sum(value.kind == "parameter" for value in graph.values)
    assert simulate(graph, keep_all(graph)).again == 0


def test_scaled_refuses_no_ops():
    with pytest.raises(lowtide.LowtideError, match="at least one op, 0 were"):
        corpus.scaled(0)
