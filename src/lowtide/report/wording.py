"""Names of any length made fit to show."""

from __future__ import annotations

from ..files.plain_text import plain

__all__ = ["short"]


def short(text: str, most: int = 90) -> str:
    """Plain text of a bounded length, cut in the middle where it is too long."""
    text = plain(text)
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"
