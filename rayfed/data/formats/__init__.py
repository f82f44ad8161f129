"""File formats: how samples are stored and read."""
