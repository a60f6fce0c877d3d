"""The command `lowtide`: its arguments, its verbs, its words for errors.

In: words of the command line.
Out: text, JSON and files.
Imports: batch_size/, console/, devices/, entry/, evidence/, measuring/, planner/, plans/, report/,
  solve/.
"""
