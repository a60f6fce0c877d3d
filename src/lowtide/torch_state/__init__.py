"""What torch and Python hold around a step: autocast, random states, dispatch modes, garbage.

In: nothing: it looks at the thread it is in.
Out: states that can be compared, kept and put back.
Imports: no other room.
"""
