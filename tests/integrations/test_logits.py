"""Language models of `transformers` return their logits beside the loss; loops hold them, or do not."""

import pytest

import lowtide
from lowtide.plans.returning import let_go_of
from short_search import short_search
from small_trainings import Texts, gpt2, llama

pytest.importorskip("transformers", reason="transformers is not installed (the extra tools)")


def letting_go(model, words):
    model(input_ids=words, labels=words).loss.backward()


def holding(model, words):
    out = model(input_ids=words, labels=words)
    out.loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [letting_go, holding])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_peaks_are_as_predicted_from_the_second_step_on(make, loop):
    words = Texts(2)[0]["input_ids"].expand(4, -1).contiguous()
    model = make(use_cache=loop is holding)
    with short_search():
        lowtide.cap(model, "80%", prices="roofline")
        for step in range(3):
            model.zero_grad()
            taken = lowtide.measure(lambda: loop(model, words), device="cpu").peak
            plan = lowtide.plan_of(model)
            assert taken <= plan.peak <= plan.budget
            assert taken == plan.peak or not step
    assert bool(let_go_of(plan.graph)) == (loop is letting_go)
