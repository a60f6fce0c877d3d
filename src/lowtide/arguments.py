"""What a user may write for an argument: a function for each kind of value, which refuses others by name.

An error says which argument it was, what it was given, and what is taken. True and False are no numbers here,
and no other value stands for them: `reverse="no"` would be true. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .errors import LowtideError

__all__ = ["all_of", "flag", "function", "kind_of", "mapping", "number", "one_of", "step", "whole"]


def refused(name: str, value: Any, taken: str) -> LowtideError:
    """The error for a value that is not taken."""
    return LowtideError(f"{name}={_shown(value)} must be {taken}")


def whole(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """A whole number."""
    whole_one = isinstance(value, int) and not isinstance(value, bool)
    if not whole_one or value < least or (most is not None and value > most):
        upto = f" and <= {most}" if most is not None else ""
        raise refused(name, value, f"a whole number >= {least}{upto}")
    return int(value)


def number(name: str, value: Any, *, above: float = 0.0, most: float = math.inf) -> float:
    """A finite number."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_one or not above < value <= most or value in (math.inf, -math.inf):
        limits = f" above {above:g}" + (f", {most:g} at most" if most < math.inf else "")
        raise refused(name, value, f"a number{limits}")
    try:
        return float(value)
    except OverflowError:
        raise refused(name, value, "a number that fits a float") from None


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise refused(name, value, "True or False")
    return value


def one_of(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise LowtideError(f"{name}={_shown(value)} is not known; choose one of {', '.join(choices)}")
    return value


def function(name: str, value: Any, called: str) -> Callable[..., Any]:
    """A function, called as in `called`."""
    if not callable(value) or isinstance(value, type):
        raise refused(name, value, f"a function, called as {called}")
    return value  # type: ignore[no-any-return]


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A dict by names; none is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise refused(name, value, 'a dict of arguments by name, as in {"mask": mask}')
    return dict(value)


def all_of(name: str, value: Any, kind: type, words: str) -> tuple[Any, ...]:
    """Several things of one kind, a generator of them, too."""
    given = value if isinstance(value, Iterable) and not isinstance(value, str | kind) else (value,)
    found = tuple(given)
    flags = kind is int and any(isinstance(one, bool) for one in found)
    if given is not value or flags or not all(isinstance(one, kind) for one in found):
        raise refused(name, value, words)
    return found


def kind_of(name: str, value: Any, kind: type, words: str) -> Any:
    """One thing of a kind."""
    if not isinstance(value, kind):
        raise LowtideError(f"{name} takes {words}, not a {type(value).__name__}")
    return value


def step(verb: str, model: Any) -> Any:
    """What a step calls: a module or a function."""
    if not callable(model) or isinstance(model, type):
        raise LowtideError(f"{verb} takes a module or a function, not a {type(model).__name__}")
    return model


def _shown(value: Any, most: int = 60) -> str:
    """A value as it would be written, in one short line."""
    if type(value).__module__.partition(".")[0] == "torch":
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 4 * most:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
