"""Fed-SB: trains and averages a small matrix between the frozen factors of every LoRA adapter.

Singhal et al., Fed-SB: A Silver Bullet for Extreme Communication Efficiency and Performance in (Private)
Federated LoRA Fine-Tuning, 2025 [singhal2025fedsb], and the released code. With common A and B the mean of
the products B C A is B times the mean of C times A, exactly, and rank^2 numbers are sent for each adapter.

A, B and C begin as the singular vectors and values of what one step of full training would change, as in the
paper (`rayfed.engine.core_start` says what differs); what is sent for that is traffic of the first round.
With `tuning.core_start=random`, A and B are random with orthonormal rows and columns, and C is zero; only
this is allowed with noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rayfed import Local, Method


@dataclass(frozen=True)
class FedSb(Local):
    """Local training of the matrices between the factors."""

    needs: ClassVar[frozenset[str]] = frozenset({"lora"})
    tuning: ClassVar[Mapping[str, object]] = {"core": True}


METHOD = Method(local=FedSb, knob="it has no hyperparameter")
