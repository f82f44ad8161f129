"""What a text sample is: windows of characters, as numbers."""

WINDOW = 80
"""Characters that a model reads to guess the next one."""
SYMBOLS = 80
"""Different characters."""
