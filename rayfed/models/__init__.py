"""Backbones: building them by name, a uniform face for every library, sharing frozen weights."""
