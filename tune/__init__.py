"""Hyperparameter searches with Ray Tune and Optuna.

Inside this package Ray's module is always `ray.tune`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["resume", "search"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # imported when asked for: Ray and torch take seconds
        from tune import conduct

        return getattr(conduct, name)
    raise AttributeError(f"module 'tune' has no attribute {name!r}")
