"""Checks whether an experiment fits on the available resources, and estimates how long it takes."""
