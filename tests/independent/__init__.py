"""Runs of RayFed compared with programs that know nothing of it."""
