"""What operators do with the rows of a region: a rule for each of them, and what comes of it."""
