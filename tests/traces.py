"""What Lowtide sees of a step on its way to a plan: the graph that torch hands over, and the lifted one."""

import contextlib
from unittest import mock

import lowtide
from lowtide.entry import api
from lowtide.pipeline.pipeline import Captured, Piece


def lifted(model, *batch, **options):
    """The lifted graph of a step, before it is priced, and its trace."""
    seen = []

    class Look(Piece):
        def priced(self, found):
            seen.append((found, self.trace))
            return super().priced(found)

    with mock.patch.object(api, "Piece", Look):
        lowtide.plan(model, *batch, **options)
    return seen[0]


def joint(model, *batch):
    """The joint graph as torch hands it over, no pass applied, its primals and its tangents."""
    seen = []

    class Look(Piece):
        def partition(self, module, inputs, **_):
            seen.append(module)
            raise Captured

    with mock.patch.object(api, "Piece", Look), contextlib.suppress(lowtide.CaptureError):
        lowtide.plan(model, *batch)
    (module,) = seen
    given = module.graph.find_nodes(op="placeholder")
    return (
        module,
        [node for node in given if "tangents" not in node.name],
        [node for node in given if "tangents" in node.name],
    )
