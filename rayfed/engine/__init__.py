"""From a checked config to finished rounds: prepare, start, run, record."""
