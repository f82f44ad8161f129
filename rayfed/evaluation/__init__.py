"""Test sets of an evaluation, and statistics over clients and domains."""
