"""Gradient checkpointing and its hooks are put aside, and put back as they were."""

import pytest
import torch
from torch import nn

from lowtide.integrations.checkpointing import without_checkpointing


def make_inputs_require_grads(module, inputs, output):
    output.requires_grad_(True)


def another(module, inputs, output):
    return output


@pytest.fixture
def model():
    made = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    made[0].requires_grad_(False)
    made[0].register_forward_hook(make_inputs_require_grads)
    made[0].register_forward_hook(another)
    made[1].gradient_checkpointing = True
    made[2].gradient_checkpointing = False
    return made


def hooks(model):
    return [hook.__name__ for hook in model[0]._forward_hooks.values()]


def flags(model):
    return [layer.gradient_checkpointing for layer in model[1:]]


def test_it_is_off_meanwhile_and_as_it_was_afterwards(model):
    with without_checkpointing(model) as was_on:
        assert was_on
        assert flags(model) == [False, False]
        assert hooks(model) == ["another"]
        assert not model[0](torch.ones(2, dtype=torch.long)).requires_grad
    assert flags(model) == [True, False]
    assert hooks(model) == ["make_inputs_require_grads", "another"]
    assert model[0](torch.ones(2, dtype=torch.long)).requires_grad


def test_an_error_puts_it_back_and_later_hooks_stay(model):
    def later(module, inputs, output):
        return output

    def training():
        with without_checkpointing(model):
            model[0].register_forward_hook(later)
            raise KeyError

    with pytest.raises(KeyError):
        training()
    assert hooks(model) == ["make_inputs_require_grads", "another", "later"]
    assert flags(model) == [True, False]


def test_a_model_without_any_is_left_alone():
    model = nn.Linear(2, 2)
    with without_checkpointing(model) as was_on:
        assert not was_on
    assert "gradient_checkpointing" not in vars(model)
