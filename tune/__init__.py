"""Hyperparameter search with Ray Tune and Optuna.

Inside this package, `tune` is this package and `ray.tune` is Ray's.
"""

from __future__ import annotations

from typing import Any

__all__ = ["resume", "search"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported on first use, because importing Ray and torch takes seconds
        from tune import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'tune' has no attribute {name!r}")
