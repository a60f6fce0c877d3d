"""What a graph compiled by Inductor holds in memory, read from the text of its generated code."""
