"""What is changed for the whole process while a step is captured, and how it is put back.

torch keeps settings, tables and functions in modules and classes, where every thread sees them. A `Change` of
such a thing lasts for a block. It is put back

- when the block ends, however it ends. An interrupt may come between any two instructions, also while
  something is put back: so that may be done twice, and `nothing_left` around a call does it for what is
  inside;
- in a forked child. The other threads are gone there, perhaps in the middle of such a block: what they
  changed is put back, and the locks that they held are free.

A change of several threads at once (`shared`) is made by the first and put back by the last of them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Change", "Shared", "UndoneBy", "attributes", "here", "lock", "lock_of_torch", "nothing_left"]

UndoneBy = Callable[[Callable[[], object]], None]
"""Is told what takes back a part of a change, right before it is made."""

_in_force: list[Change] = []
"""Of all threads, in the order in which they were begun."""

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


class Change:
    """A change for the length of a block; `make` calls `undone_by` for each part right before it is done."""

    def __init__(self) -> None:
        self.thread = 0
        self.undo: list[Callable[[], object]] = []

    def make(self) -> None:
        """Make the change."""
        raise NotImplementedError

    def undone_by(self, undo: Callable[[], object]) -> None:
        """Note what takes back the next part of the change; it may be called twice, or for nothing."""
        self.undo.append(undo)

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        try:
            _in_force.append(self)
            self.make()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            self.end()

    def end(self) -> None:
        """Put back what was changed, after what an interrupt left inside of this block."""
        inside = _in_force[_in_force.index(self) + 1 :] if self in _in_force else []
        for change in reversed([change for change in inside if change.thread == self.thread]):
            change.end()
        while self.undo:
            self.undo[-1]()
            self.undo.pop()  # only now: an interrupt may have come in between
        if self in _in_force:
            _in_force.remove(self)


class nothing_left(Change):  # noqa: N801  # reads as a phrase where it is used
    """Put back what this thread has changed inside and an interrupt kept from being put back."""

    def make(self) -> None:
        """Change nothing."""


class attributes(Change):  # noqa: N801  # reads as a verb where it is used
    """Set attributes of a class, a module or a configuration for a while."""

    def __init__(self, owner: Any, **values: Any) -> None:
        super().__init__()
        self.owner, self.values = owner, values

    def make(self) -> None:
        """Set those that are not so yet: setting one of torch's takes longer than looking at it."""
        for name, value in self.values.items():
            present = getattr(self.owner, name)
            if present is not value:
                self.undone_by(lambda name=name, present=present: setattr(self.owner, name, present))  # type: ignore[misc]
                setattr(self.owner, name, value)


class here(attributes):  # noqa: N801  # reads as an adverb where it is used
    """Set attributes of a `threading.local` for a while, for this thread alone."""

    def end(self) -> None:
        """Put back what was set: in the thread that set it, or nowhere."""
        if threading.get_ident() == self.thread:
            super().end()


class Shared:
    """A change that several threads may want at once: the first makes it, the last puts it back."""

    def __init__(self, make: Callable[[UndoneBy], None]) -> None:
        self.make = make
        self.lock = lock()
        self.holders: list[Change] = []
        self.undo: list[Callable[[], object]] = []

    def __call__(self) -> Change:
        """The block of one thread."""
        return _Held(self)

    def let_go(self, holder: Change) -> None:
        """End the block of one thread."""
        with self.lock:
            if holder in self.holders:
                self.holders.remove(holder)
            while self.undo and not self.holders:
                self.undo[-1]()
                self.undo.pop()


class _Held(Change):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def make(self) -> None:
        shared = self.shared
        with shared.lock:
            self.undone_by(lambda: shared.let_go(self))
            shared.holders.append(self)
            shared.make(shared.undo.append)


def lock() -> Any:
    """A lock that its holder may take again, and that is free in a child whose parent's threads held it."""
    made = threading.RLock()
    _locks.add(made)
    return made


def lock_of_torch(found: Any) -> Any:
    """A lock of torch's as such a one."""
    _locks.add(found)
    return found


def _in_child() -> None:
    """Called in a forked child, where only the thread that forked goes on."""
    for each in list(_locks):
        if not each._is_owned():
            each._at_fork_reinit()
    me = threading.get_ident()
    for change in reversed([c for c in _in_force if c.thread != me]):
        change.end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
