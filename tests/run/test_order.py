"""Which of Inductor's nodes stand together: stand-ins with what is asked of the nodes of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow  # Inductor is imported, which takes seconds

MIB = 2**20


class Buffer(SimpleNamespace):
    def get_numel(self):
        return MIB

    def get_dtype(self):
        return SimpleNamespace(itemsize=4)


@dataclass
class Part:
    """A loop or a kernel of its own at a place in the order."""

    min_order: int
    extern: bool = False
    unmet_dependencies: tuple[()] = ()
    read_writes: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(reads=["something"]))

    def get_nodes(self):
        return [self]

    def get_outputs(self):
        return [SimpleNamespace(node=Buffer(), users=[])]

    def get_buffer_names(self):
        return {f"buf{self.min_order}"}

    def is_extern(self):
        return self.extern

    def is_template(self):
        return False


@dataclass
class Copies:
    """Several copies into one concatenation, which Inductor makes a single node of on a GPU."""

    parts: list[Part]

    def get_nodes(self):
        return self.parts


def stand_together(*nodes):
    from lowtide.run.inductor import scheduler_order

    return scheduler_order.stand_together(*nodes)


def test_loops_on_two_sides_of_a_kernel_of_its_own_do_not_stand_together():
    nodes = [Part(0), Part(1), Part(2, extern=True), Part(3)]
    scheduler = SimpleNamespace(nodes=nodes)
    assert stand_together(scheduler, nodes[0], nodes[1])
    assert not stand_together(scheduler, nodes[1], nodes[3])


def test_copies_that_are_one_node_keep_the_places_of_their_parts():
    """Inductor puts such a node last, and counts the others as if its parts were still among them."""
    first, product, last = Part(0), Part(3, extern=True), Part(4)
    copies = Copies([Part(1), Part(2)])
    scheduler = SimpleNamespace(nodes=[first, product, last, copies])
    assert stand_together(scheduler, first, copies)
    assert not stand_together(scheduler, first, last)
    assert not stand_together(scheduler, copies, last)
