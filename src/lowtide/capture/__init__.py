"""From what torch traced to a graph: the joint fx graph made fit to be planned, and lifted.

In: AOTAutograd's joint graph, and what is known of the step's inputs.
Out: a `Trace`, and a `Lifted` graph whose ops know their fx nodes.
Imports: console/, devices/, plans/, torch_state/.
"""
