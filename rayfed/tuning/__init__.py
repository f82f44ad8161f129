"""Tuning schemes, one in each file: they decide which tensors of a backbone are trained and sent."""
