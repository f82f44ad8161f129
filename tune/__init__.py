"""Hyperparameter searches with Ray Tune and Optuna."""
