"""A plan for people: one HTML page (`page`) or a few lines of text (`text`). No torch in here.

In: a `Plan`, and what was measured of it.
Out: a whole HTML document, or text.
Imports: planner/, plans/. No torch.
"""
