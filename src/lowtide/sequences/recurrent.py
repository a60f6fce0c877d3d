"""`lowtide.Recurrent`: nn.LSTM, nn.GRU and nn.RNN, differentiated in a bounded number of bytes.

A unit of the scan is a block of steps and one fused call (`blocks`), so that the kernels of the module
survive and its weight gradients are formed once per block. `ways` says which scans a module takes and plans
them, `passage` runs them; the rest is as in `scan`.

The wrapper holds no parameters of its own: its tables of parameters, buffers and submodules *are* those of
the wrapped module, which goes on working, and whose names have no prefix in `state_dict`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from .._torch import outside_dynamo, private_of
from ..errors import LowtideError
from ..units import Budget, parse_budget, refuse_device_share
from .batch import Batch, is_sound, packed
from .passage import Passage
from .planned_scan import ScanPlan, check_chunk, check_graphs, check_not_both

__all__ = ["Recurrent"]

STOCK = (nn.LSTM.forward, nn.GRU.forward, nn.RNN.forward)


class Recurrent(nn.Module):
    """A stock recurrent module whose training keeps to a budget.

    Called as the wrapped module is, with its parameters, its `state_dict` and its results. `lengths` gives
    the steps of each row of a padded batch; after its end a row's outputs are zero.

    `budget` bounds the bytes that the recurrence holds at its peak: kept carries, recorded blocks and the
    working set of one block; not input, parameters, outputs and their gradients, nor the outputs of single
    layers and directions of a bidirectional stack. It is in bytes, as in "2GiB", or a share of what keeping
    every step would take ("5%"), or "min". `slots` is a number of carries instead, the start included, for
    each direction of each bidirectional layer. With neither, without grad, and where nothing needs a
    gradient, the wrapped module's own forward runs. `chunk` is the number of steps in a block.

    With a budget, blocks on a CUDA device are captured as CUDA graphs, where they can be: `graphs=False`
    never captures, `graphs=True` refuses what cannot be captured.

    Dropout between layers is drawn block by block, so its masks are other ones than those of the wrapped
    module, and depend on `chunk`; those of a bidirectional stack are drawn for all steps at once.

    >>> import lowtide, torch
    >>> rnn = lowtide.Recurrent(torch.nn.LSTM(8, 16), budget="min")
    >>> output, (h, c) = rnn(torch.randn(100, 4, 8))
    >>> output.sum().backward()
    """

    def __init__(
        self,
        module: nn.RNNBase,
        *,
        budget: int | str | Budget | None = None,
        slots: int | None = None,
        chunk: int | Literal["auto"] = "auto",
        graphs: bool | Literal["auto"] = "auto",
    ) -> None:
        _check(module, budget, slots, chunk)
        check_graphs(graphs)
        super().__init__()
        shared = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        self.__dict__.update({name: module.__dict__[name] for name in shared}, wrapped=module)
        self.budget, self.slots, self.chunk, self.graphs = budget, slots, chunk, graphs
        self.training = module.training

    @outside_dynamo
    def forward(self, input: Any, hx: Any = None, *, lengths: Any = None) -> tuple[Any, Any]:  # noqa: A002  # torch's
        module = self.wrapped
        if lengths is not None:
            output, hidden = self.forward(packed(module, input, lengths), hx)
            steps = input.shape[1 if module.batch_first else 0]
            return pad_packed_sequence(output, module.batch_first, total_length=steps)[0], hidden
        capped = self.budget is not None or self.slots is not None
        if not (capped and torch.is_grad_enabled() and self._trains(input, hx)):
            return self._plainly(input, hx)
        passage = Passage(self, module, Batch(module, input, hx))
        return passage.run(passage.plans(self.budget, self.slots, self.chunk, self.graphs))

    def plan(self, x: Any, hx: Any = None, *, lengths: Any = None) -> ScanPlan | tuple[ScanPlan, ...]:
        """What a call with the same arguments would do; for a bidirectional module one plan for each scan.

        Some blocks run forward and backward to measure their bytes; random state and gradients stay as they
        were.
        """
        module = self.wrapped
        if lengths is not None:
            x = packed(module, x, lengths)
        if not self._trains(x, hx):
            self._plainly(x, hx)  # where the input is wrong, this says so
            raise LowtideError(
                "nothing here needs a gradient, so there is nothing to keep and nothing to plan"
            )
        with torch.enable_grad():
            passage = Passage(self, module, Batch(module, x, hx))
            plans = passage.plans(self.budget, self.slots, self.chunk, self.graphs, weigh=True)
        return plans if module.bidirectional else plans[0]

    def _trains(self, x: Any, hx: Any) -> bool:
        """Whether there are gradients to come, and the input is one that the module takes."""
        parameters = list(self.parameters())
        if not is_sound(self.wrapped, x, hx, parameters[0].dtype):
            return False
        if any(
            hooks
            for hooks in (
                private_of(self.wrapped, "forward_hooks"),
                private_of(self.wrapped, "forward_pre_hooks"),
            )
        ):
            raise LowtideError(
                "the wrapped module has forward hooks, which would not be called for its blocks; put them on "
                "the Recurrent instead"
            )
        given = [x.data if isinstance(x, PackedSequence) else x]
        given += [] if hx is None else hx if self.wrapped.mode == "LSTM" else [hx]
        return any(leaf.requires_grad for leaf in (*parameters, *given))

    def _plainly(self, x: Any, hx: Any) -> tuple[Any, Any]:
        """The wrapped module's own forward."""
        module = self.wrapped
        for number, name in enumerate(private_of(module, "flat_weights_names")):
            if not hasattr(module, name):  # it was parametrized on the wrapper, so the module cannot see it
                private_of(module, "flat_weights")[number] = getattr(self, name)
        result: tuple[Any, Any] = module(x, hx)
        return result

    def train(self, mode: bool = True) -> Recurrent:
        self.wrapped.train(mode)
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> Recurrent:
        self.wrapped._apply(fn, recurse)  # its tables are ours, and it knows which memory cuDNN wants
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "wrapped" not in self.__dict__:
                raise
            return getattr(self.__dict__["wrapped"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in nn.RNNBase.__constants__:  # the module's own settings
            setattr(self.wrapped, name, value)
        else:
            super().__setattr__(name, value)

    def __repr__(self) -> str:
        settings = {"budget": self.budget, "slots": self.slots, "chunk": self.chunk, "graphs": self.graphs}
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items() if value is not None)
        return f"Recurrent({self.wrapped!r}, {said})"


def _check(module: Any, budget: Any, slots: Any, chunk: Any) -> None:
    """Refuse what cannot be wrapped, and settings that cannot be."""
    if not isinstance(module, nn.RNNBase) or type(module).forward not in STOCK:
        raise LowtideError(
            f"Recurrent wraps nn.LSTM, nn.GRU and nn.RNN with their own forward, not a "
            f"{type(module).__name__}; for a loop of your own there is lowtide.scan"
        )
    check_not_both(budget, slots)
    if budget is not None:
        refuse_device_share(parse_budget(budget), "Recurrent")
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < 1):
        raise LowtideError(f"slots={slots!r} must be a whole number of carries of at least 1")
    check_chunk(chunk)
