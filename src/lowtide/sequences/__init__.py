"""Backpropagation through time in bounded memory (Gruslys et al. 2016).

In: a cell, its first carry, its inputs and a budget.
Out: the outputs, with a backward that recomputes.
Imports: console/, devices/, measuring/, solve/, torch_state/.
"""

from .open_ended import while_scan
from .planned_scan import ScanPlan
from .recurrent import Recurrent
from .scanning import scan, scan_plan

__all__ = ["Recurrent", "ScanPlan", "scan", "scan_plan", "while_scan"]
