"""Runs one experiment: prepares it, runs it, and writes its tables, figures and report."""
