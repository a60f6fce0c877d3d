"""The search behind `auto`: descents over a tape, and the ladder of plans that they fill."""
