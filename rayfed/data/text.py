"""Sizes of text samples, which are windows of characters given as numbers."""

WINDOW = 80
"""Number of characters in a window, from which a model predicts the next one."""
SYMBOLS = 80
"""Number of different characters."""
