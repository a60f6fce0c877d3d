"""The benchmarks of sketches at a tiny size: every row is made, once, and the tables are made of them."""

import json

import numpy as np
import pytest
import torch

import sketch_glue
import sketch_memory
from sketch_glue_data import TASKS, correlation, ranks, read
from sketch_glue_results import KINDS
from sketch_glue_results import table as glue_table
from sketch_memory_results import Group, Way, groups, tables, ways

pytestmark = pytest.mark.slow

TINY = ["--device=cpu", "--tiny", "--workers=0", "--case=mrpc", "--dtype=float32", "--how=eager"]
TINY += ["--attention=sdpa", "--sketch=none,strided 10%"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "a", "day", '"']


@pytest.fixture(scope="module")
def memory(tmp_path_factory):
    out = tmp_path_factory.mktemp("memory") / "rows.jsonl"
    sketch_memory.main([*TINY, f"--out={out}"])
    return out


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A tiny encoder in the files that the benchmark reads."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", model_input_names=names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Tasks that are easy: what is good is one class."""
    folder = tmp_path_factory.mktemp("glue")
    good, bad = 'a good " day', "a bad day a day"
    lines = {
        "CoLA": [f"x\t{i % 2}\t\t{good if i % 2 else bad}" for i in range(64)],
        "STS-B": ["head", *("\t".join([*"1234567", "a", good, "4.5"]) for _ in range(8))],
    }
    for name, rows in lines.items():
        (folder / name).mkdir()
        for split in ("train", "dev"):
            (folder / name / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return folder


def test_the_peaks_and_times_of_a_sketch_and_of_recomputation_to_its_peak(memory):
    rows = [json.loads(line) for line in memory.read_text().splitlines()]
    plain, sketched, exact, both = rows
    assert [(row["sketch"], row["cap"]) for row in rows] == [
        ("none", ""), ("strided 10%", ""), ("none", "as strided 10%"), ("strided 10%", "80%")
    ]  # fmt: skip
    assert sketched["peak"] < plain["peak"]
    assert exact["peak"] <= exact["budget"] == sketched["peak"]
    assert both.get("refused") or both["peak"] <= both["budget"] < sketched["peak"]
    assert all(row["plain_milliseconds"] > 0 and row["tiny"] for row in rows)


def test_rows_of_memory_are_not_made_again_and_make_a_table(memory, capsys):
    before = memory.read_text()
    sketch_memory.main([*TINY, f"--out={memory}"])
    assert memory.read_text() == before
    sketch_memory.main(["--table", f"--out={memory}"])
    shown = capsys.readouterr().out
    assert "| 128 x 128 tokens (MRPC) | strided 10% |" in shown
    assert "| 23 % |" in shown
    assert "a tiny version" in shown


def test_tiny_rows_do_not_go_among_the_results():
    with pytest.raises(SystemExit):
        sketch_memory.main(["--tiny"])


def test_a_cap_comes_after_the_row_that_its_budget_is_of():
    for group in groups():
        order = ways(group)
        assert len(set(order)) == len(order)
        for place, way in enumerate(order):
            assert not way.cap or way.budget_of in order[:place]
    assert len(groups()) == 18


def test_a_table_shows_what_did_not_fit_and_what_is_saved_of_the_same_way_of_running():
    facts = {"device": "cpu", "torch": "2", "plain_milliseconds": 10.0, "milliseconds": 12.0}
    group = Group("qnli", "bfloat16", "sdpa", "compiled")._asdict()
    rows = [
        {**group, **Way()._asdict(), **facts, "peak": 2**30},
        {**group, **Way("int4")._asdict(), **facts, "peak": 2**29},
        {**group, **Way(cap="as int4")._asdict(), "refused": True},
    ]
    assert tables(rows).splitlines()[-1] == (
        "| 16 x 512 tokens (QNLI) | int4 | 0.50 | 50.0 % | 1.20 | does not fit |"
    )


def glue(out, encoder, data, *more):
    options = ["--tasks=cola,stsb", "--kinds=exact,strided 50%,int8", "--seeds=1", "--epochs=8", "--batch=16"]
    paths = [f"--out={out}", f"--encoder={encoder}", f"--data={data}"]
    sketch_glue.main([*options, "--rate=3e-3", *paths, *more])
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_fine_tuning_learns_with_every_kind_and_is_continued(encoder, data, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert glue(out, encoder, data, "--deadline=0") == []
    rows = glue(out, encoder, data)
    assert [(row["task"], row["kind"]) for row in rows] == [
        (task, kind) for task in ("cola", "stsb") for kind in ("exact", "strided 50%", "int8")
    ]
    for row in rows:
        assert row["last_loss"] < row["loss"]
        assert row["kind"] == "exact" or row["noise"] >= 0
        assert row["task"] != "cola" or row["matthews"] > 0.9
    assert glue(out, encoder, data) == rows
    capsys.readouterr()
    glue(out, encoder, data, "--table")
    assert "| exact | 100.0 |" in capsys.readouterr().out


def test_a_packed_encoder_is_half_as_large_and_trains(encoder, data, tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "rows.jsonl"
    glue(out, encoder, data, f"--pack={packed}")
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (packed, encoder)]
    assert sizes[0] < 0.6 * sizes[1]
    assert len(glue(out, packed, data, "--kinds=exact", "--tasks=cola", "--epochs=1")) == 1


def test_sentences_keep_their_quotes(data):
    columns, targets = read(TASKS["cola"], data / "CoLA" / "train.tsv")
    assert columns[0][1] == 'a good " day'
    assert targets[:2] == [0, 1]
    assert read(TASKS["stsb"], data / "STS-B" / "dev.tsv")[1] == [0.9] * 8


def test_correlations_are_those_of_the_definitions():
    a, b = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 0, 1])
    true_positives, true_negatives, false_positives = 2, 2, 1
    assert correlation(a, b) == pytest.approx(
        (true_positives * true_negatives - false_positives * 0) / (3 * 2 * 3 * 2) ** 0.5
    )
    assert correlation(np.ones(3), np.arange(3)) == 0
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_the_table_of_fine_tuning_has_means_spreads_and_the_papers_figures():
    facts = {"task": "cola", "device": "cpu", "torch": "2", "loss": 0.5}
    rows = [{**facts, "kind": KINDS[0], "seed": seed, "matthews": 0.4 + seed / 50} for seed in range(3)]
    text = glue_table(rows)
    assert "| exact | 42.0 ± 2.0 | 0.500 |  | 60.9 |" in text
    assert "of 3 seeds" in text
