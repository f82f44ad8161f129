"""Composes YAML groups and overrides into one checked config."""
