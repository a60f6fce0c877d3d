"""Models of transformers take the attention kernels of plain PyTorch, whatever a batch's mask says."""

import copy
import threading
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.capture.plain_masks import masks_as_plain, masks_as_traced
from lowtide.entry.in_place import capped_of
from small_models import gradients, same

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra tools)")

WORDS, BATCH, TIME = 64, 2, 16

SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TIME,
}
FEWER_HEADS = SMALL | {"num_key_value_heads": 2}

MODELS = {
    "gemma3, sliding and whole": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        FEWER_HEADS | {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
}


def make(model, config, options):
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    made.loss_type = made.loss_type or "ForCausalLM"
    return made


def llama():
    return make("LlamaForCausalLM", "LlamaConfig", FEWER_HEADS | {"num_hidden_layers": 1})


def words():
    return torch.randint(3, WORDS, (BATCH, TIME), generator=torch.Generator().manual_seed(1))


def ones():
    return torch.ones(BATCH, TIME, dtype=torch.long)


def padded():
    return (torch.arange(TIME) < torch.tensor([TIME, 10])[:, None]).long()


def counted():
    return torch.arange(TIME).repeat(BATCH, 1)


def packed():
    return torch.cat([torch.arange(6), torch.arange(TIME - 6)]).repeat(BATCH, 1)


class Log(TorchDispatchMode):
    """Counts the operators that make new floating point tensors, with the sizes of these."""

    def __init__(self):
        super().__init__()
        self.made = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        before = {leaf.untyped_storage().data_ptr() for leaf in tensors((args, kwargs))}
        made = [leaf for leaf in tensors(result) if leaf.untyped_storage().data_ptr() not in before]
        if any(leaf.is_floating_point() for leaf in made):
            self.made[str(operator), str([tuple(leaf.shape) for leaf in made])] += 1
        return result


def tensors(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def step(model, **batch):
    """The gradients of a step, and the operators that it called."""
    model.zero_grad()
    torch.manual_seed(2)
    with Log() as log:
        model(input_ids=words(), labels=words(), **batch).loss.backward()
    return gradients(model), log.made


def kernels(made):
    return {name for name, _ in made if "attention" in name}


def capped(plain):
    return lowtide.cap(copy.deepcopy(plain), "1GiB", method="keep_all", prices="roofline")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whole", "part"),
    [
        ("attention_mask", ones, padded),
        pytest.param("position_ids", counted, packed),
    ],
)
def test_llama_runs_the_operators_of_the_plain_step_whatever_its_batch_says(name, whole, part):
    plain = llama()
    model = capped(plain)
    for _ in range(2):
        for batch in (whole, part):
            expected, called = step(plain, use_cache=False, **{name: batch()})
            found, ran = step(model, use_cache=False, **{name: batch()})
            assert same(found, expected)
            assert ran == called
    assert len(capped_of(model).entries) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bits_and_kernels_are_those_of_the_plain_step(name):
    plain = make(*MODELS[name])
    model = capped(plain)
    for mask in (ones(), padded(), None):
        expected, called = step(plain, attention_mask=mask)
        found, ran = step(model, attention_mask=mask)
        assert same(found, expected)
        assert kernels(ran) == kernels(called)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [ones, padded])
def test_verify_says_yes(mask):
    batch = {"input_ids": words(), "labels": words(), "attention_mask": mask()}
    found = lowtide.verify(llama(), budget="85%", kwargs=batch)
    assert found.verdict == "yes", str(found)
    assert found.measured == found.predicted


def masks_in(plan):
    """The ops that make a mask of all pairs of words."""
    return [op.name for op in plan.graph.ops if op.target in ("aten.le.Tensor", "aten.bitwise_and.Tensor")]


@pytest.mark.slow
def test_a_plan_without_data_is_for_a_batch_without_padding_and_says_so():
    batch = {"input_ids": words(), "labels": words(), "attention_mask": padded()}
    padded_plan = lowtide.plan(llama(), kwargs=batch)
    assert masks_in(padded_plan)
    assert not any("padded" in note for note in padded_plan.notes)
    batch = {name: tensor.to("meta") for name, tensor in batch.items()}
    plan = lowtide.plan(llama().to("meta"), kwargs=batch)
    assert not masks_in(plan)
    assert any("no data that tells whether it is padded" in note for note in plan.notes)


def test_transformers_is_told_the_truth_elsewhere():
    from transformers import masking_utils

    before, fake = masking_utils.is_tracing, torch.ones(1, device="meta")
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(1))
    answers = []
    with masks_as_plain():
        assert not masking_utils.is_tracing(fake)
        with masks_as_plain():
            assert not masking_utils.is_tracing(fake)
        with masks_as_traced():
            assert masking_utils.is_tracing(fake)
        other = threading.Thread(target=lambda: answers.append(masking_utils.is_tracing(fake)))
        other.start()
        other.join()
        assert not masking_utils.is_tracing(fake)
    assert answers == [True]
    assert masking_utils.is_tracing is before
    assert before(fake)
