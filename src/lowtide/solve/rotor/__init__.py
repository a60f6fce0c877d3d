"""rotor (Beaumont et al. 2019): a chain of blocks under a budget, with several options per block."""

from .chain import Action, ChainPlan, Option, Stage
from .method import rotor, rotor_orders
from .table import ChainTable, chain_frontier, plan_chain

__all__ = [
    "Action",
    "ChainPlan",
    "ChainTable",
    "Option",
    "Stage",
    "chain_frontier",
    "plan_chain",
    "rotor",
    "rotor_orders",
]
