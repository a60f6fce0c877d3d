"""What Lowtide sees of a step on its way to a plan: the graph that torch hands over, and the lifted one."""

import contextlib
from unittest import mock

import lowtide
from lowtide.pipeline import eager_step, way_down


def lifted(model, *batch, **options):
    """The lifted graph of a step, fused where it is compiled, before it is priced, and its trace."""
    seen = []
    price, price_step = way_down.price, way_down.price_step

    def look(found, device, **choices):
        seen.append(found)
        return price(found, device, **choices)

    def look_at_stage(captured):
        seen.append(captured.trace)
        return price_step(captured)

    with (
        mock.patch.object(way_down, "price", look),
        mock.patch.object(way_down, "price_step", look_at_stage),
    ):
        lowtide.plan(model, *batch, **options)
    trace, found, *_ = seen
    return found, trace


def joint(model, *batch):
    """The joint graph as torch hands it over, no pass applied, its primals and its tangents."""
    seen = []

    def look(asked, module, forward_outputs):
        seen.append(module)
        raise lowtide.CaptureError("seen")

    with mock.patch.object(eager_step, "lowered", look), contextlib.suppress(lowtide.CaptureError):
        lowtide.plan(model, *batch)
    (module,) = seen
    given = module.graph.find_nodes(op="placeholder")
    return (
        module,
        [node for node in given if "tangents" not in node.name],
        [node for node in given if "tangents" in node.name],
    )
