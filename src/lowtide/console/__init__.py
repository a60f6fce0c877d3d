"""What Lowtide shows on a terminal: its log, its progress, lines of the user's own code.

In: messages, plans, stacks.
Out: lines on standard error, words for errors.
Imports: plans/.
"""
