"""Tuning schemes, one per file: which named tensors of a backbone train and travel."""
