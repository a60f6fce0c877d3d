"""What torch writes for logs that nobody reads is left out of a capture, and is there where somebody does."""

import torch
from torch import nn

import lowtide
from lowtide._torch import calls_unnamed, private
from lowtide._torch.unread import side_effects_untold


class Counting(nn.Module):
    """A layer that notes its calls on itself."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).relu()


def test_a_capture_writes_no_texts_and_sets_attributes_all_the_same(monkeypatch):
    asked = []
    for module, name in (
        (private("front_end"), "get_funcname"),
        (private("side_effects").SideEffects, "_format_side_effect_message"),
        (private("guards_of_front_end"), "profile_guard_manager"),
    ):
        monkeypatch.setattr(module, name, lambda *args, name=name: asked.append(name) or 0.0)
    model = lowtide.cap(Counting(), "1MiB")
    model(torch.ones(4, 8)).sum().backward()
    assert model.calls == 1
    assert asked == []


def test_a_capture_writes_the_code_of_no_graph_but_what_runs(monkeypatch):
    written = []
    recompile = torch.fx.GraphModule.recompile
    monkeypatch.setattr(
        torch.fx.GraphModule, "recompile", lambda self: written.append(type(self)) or recompile(self)
    )
    lowtide.cap(Counting(), "1MiB")(torch.ones(4, 8)).sum().backward()
    assert len(written) <= 1  # the front end's own, for asserts of sizes


def test_a_log_that_is_on_is_written(monkeypatch):
    front_end, side_effects = private("front_end"), private("side_effects")
    usual = front_end.get_funcname
    with calls_unnamed():
        assert front_end.get_funcname is not usual
    assert side_effects_untold()
    for log in (front_end.trace_call_log, side_effects.side_effects_log):
        monkeypatch.setattr(log, "isEnabledFor", lambda level: True)
    with calls_unnamed():
        assert front_end.get_funcname is usual
    assert not side_effects_untold()
