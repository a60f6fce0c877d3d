"""Training on several ranks: one plan for all of them, and plans for ranks that are not there.

In: a priced step with collectives, or a model and a number of ranks.
Out: the same plan on every rank or an error on every rank; a model whose parameters are sharded.
Imports: capture/, devices/, plans/, prices/.
"""
