"""Measurements of speed, memory and results, each its own command."""
