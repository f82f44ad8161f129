"""Grey levels of prepared slices of medical volumes: what a reader writes and a network turns back."""

from __future__ import annotations

MEAN_LEVEL = 128
"""Grey level of the mean intensity of a volume."""
DEVIATION_LEVELS = 32
"""Number of grey levels of one standard deviation of a volume."""
