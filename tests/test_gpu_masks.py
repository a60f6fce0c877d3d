"""On a CUDA device a Llama takes the attention kernels of the plain step, with a mask of ones and without."""

import copy

import pytest
import torch

import lowtide

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra tools)")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
]


def llama():
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def step(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def kernels(model, batch):
    """The attention kernels that a step launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        step(model, batch)
    return {event.key for event in seen.key_averages() if "attention" in event.key and "::_" in event.key}


@pytest.mark.parametrize("cache", [True, False])
def test_kernels_and_gradients_are_those_of_the_plain_step(cache):
    words = torch.randint(3, 512, (2, 256), device="cuda")
    padded = torch.ones_like(words)
    padded[1, 200:] = 0
    plain = llama()
    model = lowtide.cap(copy.deepcopy(plain), "100%", prices="roofline")
    for mask in (torch.ones_like(words), padded, None):
        batch = {"input_ids": words, "labels": words, "attention_mask": mask, "use_cache": cache}
        found, expected = (step(each, batch) for each in (model, plain))
        torch.testing.assert_close(found, expected)  # the backward of some kernels adds in no fixed order
        assert kernels(model, batch) == kernels(plain, batch)
