"""Names in the folder of a run."""

COMPARE = "compare"
"""The folders of the other runs of `compare` are in here, one for each algorithm."""
