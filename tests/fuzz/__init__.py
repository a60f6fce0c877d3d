"""Random modules, graphs and files, for as long as one likes: `make fuzz`.

Each part has one function `case(seed)`, which raises where something does not hold; a seed is a case again.
What holds of every case is in the part's first lines. `test_fuzz.py` runs a few of each with the other tests.
"""
