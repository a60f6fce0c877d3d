"""Training over several devices under one cap.

In: a model whose blocks are sharded by `fully_shard`, and a batch.
Out: what each unit may save and take, and the step that runs it so.
Imports: capture/, console/, devices/, lowering/, measuring/, options/, pipeline/, planner/, plans/, sketching/,
stages/, torch_state/.
"""
