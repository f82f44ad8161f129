"""Federated methods, one per file; the name `METHOD` at the end of each file holds the method."""
