"""Models that `fully_shard` has sharded: one cap over all of their units.

In: a model whose blocks are sharded by `fully_shard`, and a batch.
Out: what each unit may save and take, and the step that runs it so.
Imports: capture/, devices/, lowering/, measuring/, pipeline/, planner/, plans/, sketching/, torch_state/.
"""
