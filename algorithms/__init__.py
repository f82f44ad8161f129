"""Federated methods, one per file; each file ends with METHOD = Method(...)."""
