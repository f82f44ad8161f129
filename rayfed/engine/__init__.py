"""Prepares an experiment, starts it, runs its rounds, and records each of them."""
