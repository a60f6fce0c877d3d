"""The command `lowtide`: its arguments, its verbs, its words for errors.

In: words of the command line.
Out: text, JSON and files.
Imports: the public verbs in entry/, evidence/, batch_size/, planner/, and report/.
"""
