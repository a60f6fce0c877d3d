"""Names of any length made fit to show."""

from __future__ import annotations

__all__ = ["short"]


def short(text: str, most: int = 90) -> str:
    """Text of a bounded length that can be written as UTF-8, cut in the middle where it is too long."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"
