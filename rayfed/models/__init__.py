"""Backbones: building them by name, one interface for models of all libraries, shared frozen weights."""
