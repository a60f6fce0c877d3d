"""The best checkpoints of an `nn.Sequential`, chosen by measuring it (Hong et al. 2025).

In: an `nn.Sequential`, a batch and a budget.
Out: a `CheckpointedChain`.
Imports: devices/, measuring/, solve/.
"""
