"""Reproduces a table of a paper: runs its cells as one study, and compares our numbers with its own."""
