"""A scan that keeps everything, or that nobody will differentiate: a plain loop."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

import torch

from .loop import First
from .outputs import Last, Outputs, Stacked, Summed, check_alike
from .sequence import Piece, Sequence

__all__ = ["run_plainly"]


def run_plainly(
    sequence: Sequence,
    carry: list[Any],
    xs: Several[torch.Tensor],
    outputs: Outputs,
    first: First | None = None,
) -> tuple[list[Any], list[Any]]:
    """The last carry and the outputs, as autograd sees a plain loop; `first` is unit 0's run, if it ran."""
    pieces: list[Piece] = []
    for unit in range(sequence.units):
        if first is not None and unit == 0:
            carry, made = first.carry, first.pieces
        else:
            carry, made = sequence.run(unit, carry, [xs[cut.leaf][cut.place] for cut in sequence.cuts(unit)])
        pieces = _joined(pieces, made, outputs)
    return carry, _results(pieces, outputs)


def _joined(pieces: list[Piece], made: list[Piece], outputs: Outputs) -> list[Piece]:
    """The outputs so far: all of them, or what they are folded into."""
    for piece in made:
        if isinstance(outputs, Last) or not pieces:
            pieces = [piece]
            for leaf in piece.leaves:
                outputs.begin(leaf)
            continue
        for old, new in zip(pieces[0].leaves, piece.leaves, strict=True):
            check_alike(old, new)
        if isinstance(outputs, Summed):
            pieces = [Piece(0, [a + b for a, b in zip(pieces[0].leaves, piece.leaves, strict=True)])]
        else:
            pieces.append(piece)
    return pieces


def _results(pieces: list[Piece], outputs: Outputs) -> list[Any]:
    if isinstance(outputs, Stacked):
        ordered = sorted(
            pieces, key=lambda piece: piece.place if isinstance(piece.place, int) else piece.place.start
        )
        return [torch.stack(leaves) for leaves in zip(*(piece.leaves for piece in ordered), strict=True)]
    scale = getattr(outputs, "scale", None)
    return [leaf if scale is None else leaf * scale for leaf in pieces[0].leaves]
