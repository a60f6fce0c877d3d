"""The verbs of the command line, one file each: `run` takes the parsed arguments and gives an `Answer`."""

from typing import NamedTuple

__all__ = ["Answer"]


class Answer(NamedTuple):
    """What a verb prints, and whether what it checked holds."""

    text: str
    holds: bool = True
