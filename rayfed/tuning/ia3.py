"""(IA)3: keys, values and hidden activations of every block are scaled by trained vectors; also the head.

Liu et al., Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning, NeurIPS
2022 [liu2022ia3], section 3.3, as PEFT implements it: the output of the layers of keys and values and the
input of the last layer of an MLP are multiplied by vectors, which start as 1, so that the tuned model first
computes what the frozen one does. The vectors are never merged into the frozen weights.

Differs from the paper: where one layer computes queries, keys and values, as in ViT, the queries are scaled
too, as PEFT does it. A mixer has no attention; the hidden activations of its token mixing are scaled too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from rayfed.models.backbone import Backbone
from rayfed.tuning.base import freeze
from rayfed.tuning.sites import LAST, chosen_layers, exactly, in_every_block, named_layers

SITES = {
    "attention": (
        *(r"attn\.qkv", r"(self_)?attn\.[kv]_proj", r"attention\.self\.(key|value)(_proj)?", r"attn\.c_attn"),
        *(r"attention\.[kv]_lin", r"attention\.query_key_value", r"attn\.Wqkv"),
    ),
    "mlp": (r"mlp_tokens\.fc2", *LAST["l1"]),
}
"""Regular expressions for the layers of keys and values, and for the last layers of MLPs.

CLIP models of open_clip have only the second: PyTorch's attention reads the weights of its layers without
calling them.
"""


@dataclass(frozen=True, kw_only=True)
class IA3:
    """Train vectors that scale activations.

    Attributes:
        sites: Which layers: `attention`, whose output is scaled, `mlp`, whose input is scaled, or regular
            expressions that match the whole name of a linear layer within its block. Layers that `mlp`
            covers have their input scaled, all others their output.
        targets: Any linear layers of the network in place of `sites`, as of `tuning=lora`; their output is
            scaled.
        train_head: Whether the head is trained too.
    """

    offers: ClassVar[frozenset[str]] = frozenset()

    sites: tuple[str, ...] = ("attention", "mlp")
    targets: str | tuple[str, ...] | None = None
    train_head: bool = True

    def apply(self, model: Backbone) -> Backbone:
        with torch.device("cpu"):  # some versions compute while they are imported: `skeleton` has no values
            from peft import IA3Config, inject_adapter_in_model

        if self.targets is None:
            chosen = in_every_block(chosen_layers(model, self.sites, SITES))
        else:
            chosen = exactly(named_layers(model, self.targets, (nn.Linear,)))
        config = IA3Config(
            target_modules=chosen,
            feedforward_modules=rf"blocks\.\d+\.({'|'.join(SITES['mlp'])})",
        )
        freeze(model, self.train_head)
        on_meta = model.head.weight.is_meta
        inject_adapter_in_model(config, model.net, low_cpu_mem_usage=on_meta)
        return model


TUNING = IA3
