"""What torch's front end makes of two functions of torch's own that it would trace otherwise than they run.

It has tables: how it treats each function, and what those say that ask whether they are traced. They are
changed while a step is captured; no guard of a captured step looks at them.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch

from ..process_wide import Change
from .names import private


class rules_as_plain(Change):  # noqa: N801  # reads as a noun where it is used
    """Trace functions of torch's own as plain PyTorch runs them.

    - `nn.MultiheadAttention` in eval mode asks whether make_fx traces it: it does not, and its fast kernel
      can be captured (`_is_make_fx_tracing`, seen in 2.11-2.13);
    - `torch.backends.cudnn.flags(...)` changes nothing where there is no GPU.
    """

    def make(self) -> None:
        """Change the tables of the front end."""
        states, rules = private("tracing_states")(), private("trace_rules")()
        self.put(states, torch.nn.modules.activation._is_make_fx_tracing, False)
        if not torch.cuda.is_available():
            self.put(rules, torch.backends.cudnn.flags, _no_flags())

    def put(self, table: dict[Any, Any], key: Hashable, value: Any) -> None:
        """Set an entry of a table for a while."""
        if key in table:
            self.undone_by(functools.partial(table.__setitem__, key, table[key]))
        else:
            self.undone_by(functools.partial(table.pop, key, None))
        table[key] = value


@functools.cache
def _no_flags() -> Any:
    """What the front end makes of flags that change nothing."""

    class NoFlags(private("TorchFunction")):  # type: ignore[misc]
        def call_function(self, *_: Any) -> Any:
            return private("NullContext")()

    return NoFlags
