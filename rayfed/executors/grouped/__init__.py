"""Runs several clients in one forward and one backward pass, with the results of one pass for each."""
