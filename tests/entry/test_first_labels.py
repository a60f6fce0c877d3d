"""A classifier notes the kind of its problem at its first call: it is noted before, and planned once."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.entry.problem_type import settle_problem_type


class Config:
    problem_type = None

    def __init__(self, num_labels):
        self.num_labels = num_labels


class Classifier(nn.Linear):
    """As those of transformers are written."""

    def __init__(self, labels=3):
        super().__init__(4, labels)
        self.config = Config(labels)

    def forward(self, x, labels=None):
        logits = super().forward(x)
        if self.config.problem_type is None:
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.long, torch.int):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        if self.config.problem_type == "regression":
            return nn.functional.mse_loss(logits.squeeze(), labels)
        if self.config.problem_type == "single_label_classification":
            return nn.functional.cross_entropy(logits, labels)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


class Other(nn.Linear):
    """Has a config, and does not look at the kind of problem."""

    def __init__(self):
        super().__init__(4, 3)
        self.config = Config(3)


CASES = [(1, torch.ones(2)), (3, torch.ones(2, dtype=torch.long)), (3, torch.ones(2, 3))]


@pytest.mark.parametrize(("count", "labels"), CASES)
def test_the_kind_is_what_the_model_infers(count, labels):
    plain, settled = Classifier(count), Classifier(count)
    plain(torch.ones(2, 4), labels=labels)
    settle_problem_type([settled], labels)
    assert settled.config.problem_type == plain.config.problem_type is not None


def test_other_models_and_calls_without_labels_are_left_alone():
    other, model = Other(), Classifier()
    settle_problem_type([nn.ModuleList([other])], torch.ones(2))
    settle_problem_type([model], None)
    assert other.config.problem_type is model.config.problem_type is None


@pytest.mark.slow
def test_a_classifier_is_planned_once(caplog_lowtide):
    model = lowtide.cap(Classifier(), "1MiB")
    for _ in range(2):
        model(torch.ones(2, 4), labels=torch.ones(2, dtype=torch.long)).backward()
    assert len(caplog_lowtide) == 1
