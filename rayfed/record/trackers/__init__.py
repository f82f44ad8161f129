"""Trackers to which the rounds of a run are sent, one in each file."""
