"""Text that comes from files, made harmless to whoever shows it.

A name in a file may hold what a terminal obeys (ESC and other control characters), what turns a line around
(bidirectional marks), ends it, or cannot be written at all (lone surrogates). `plain` shows such characters
by their escapes, as `repr` does; letters of all scripts stay. What is plain already stays as it is.
"""

from __future__ import annotations

from unicodedata import category

__all__ = ["plain"]

_OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters: control, format, surrogate, and separators of lines and paragraphs."""


def plain(text: str, *, keep: str = "") -> str:
    r"""The text with characters that are obeyed instead of shown as their escapes, but for those to keep.

    >>> print(plain("a\x1b[2Jb\n"))
    a\x1b[2Jb\n
    """
    return text if text.isprintable() else "".join(c if c in keep else _shown(c) for c in text)


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode() if category(character) in _OBEYED else character
