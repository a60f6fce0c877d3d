"""Sequences: backpropagation through time in any memory."""

from .plan import ScanPlan
from .recurrent import Recurrent
from .scan import scan, scan_plan
from .while_scan import while_scan

__all__ = ["Recurrent", "ScanPlan", "scan", "scan_plan", "while_scan"]
