"""Operators with a factor round once in a captured step, as in eager: torch would capture two or three."""

import pytest
import torch

import lowtide

A, B = (torch.linspace(1, 2, 301) ** power for power in (0.5, 0.3))

STEPS = {
    "add_": lambda x: (x * 1).add_(A, alpha=0.1),
    "addcmul_": lambda x: (x * 1).addcmul_(A, B, value=0.1),
    "addcdiv_": lambda x: (x * 1).addcdiv_(A, B, value=0.1),
    "addcdiv": lambda x: torch.addcdiv(x, A, B, value=0.1),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_number_is_a_factor_of_the_operator(step):
    x = torch.linspace(0, 1, 301, requires_grad=True)
    assert torch.equal(lowtide.cap(step, "100%", prices="roofline")(x), step(x))


def test_a_tensor_as_a_factor_is_captured_as_ever():
    x, factor = torch.linspace(0, 1, 301, requires_grad=True), torch.tensor(0.1)

    def step(x):
        return (x * 1).add_(A, alpha=factor)

    torch.testing.assert_close(lowtide.cap(step, "100%", prices="roofline")(x), step(x))
