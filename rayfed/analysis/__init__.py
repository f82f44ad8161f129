"""Measurements on finished runs."""
