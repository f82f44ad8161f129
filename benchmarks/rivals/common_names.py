"""The names that RayFed's tensors have in the networks of the other programs (PEFT and transformers)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.rivals.workloads import Work


def common_names(has_params: Any, names: Iterable[str]) -> dict[str, Any]:
    """The trained values of a row or a run of RayFed, by the names of the other programs.

    Args:
        has_params: Has the values in `params`.
        names: The other names; the last layer of them is RayFed's head.
    """
    listed, params = list(names), has_params.params
    last = listed[-1].rpartition(".")[0]
    found = {}
    for name in listed:
        own = name.replace(".default.weight", "").replace("bert.encoder.layer.", "blocks.")
        if name.rpartition(".")[0] == last:
            own = f"head.{name.rpartition('.')[2]}"
        found[name] = np.asarray(params[own])
    return found


def peft_names(work: Work, start: Mapping[str, Any]) -> dict[str, Any]:
    """The values of LoRA and of the head by the names of the other programs. Args: start: by RayFed's."""
    head, blocks = ("classifier", "bert.encoder.layer.") if work.is_text else ("head", "blocks.")
    named = {}
    for name, value in start.items():
        its = re.sub(r"(lora_[AB])$", r"\1.default.weight", re.sub(r"^head\.", f"{head}.", name))
        named[re.sub(r"^blocks\.", blocks, its)] = np.asarray(value)
    return named
