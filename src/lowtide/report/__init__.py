"""A plan for people: one HTML page (`page`) or a few lines of text (`text`). No torch in here."""
