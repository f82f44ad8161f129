"""LoRA: low-rank updates of linear layers in every block, and the head.

Hu et al., LoRA, ICLR 2022 [hu2022lora], Eq. 3, as PEFT implements it: y = W x + b + alpha / rank * B A
dropout(x). A starts Kaiming-uniform and B as zero, so that the tuned model first computes what the frozen one
does. The update is never merged into W.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Lt
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.language import SITES, LibraryNames
from rayfed.models.lora_layer import ADAPTED, CONVOLUTIONS, AdaptedLinear, adapt
from rayfed.models.named_tensors import RESIDUAL_LEAF
from rayfed.tuning.base import freeze
from rayfed.tuning.sites import LAST, called_layers, chosen_layers, exactly, in_every_block, named_layers
from rayfed.types import Count, Positive

LEAVES = (".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B")
"""Ends of the global names of factors."""

STEM = r"patch_embed\.proj"
"""Name of the patch embedding, as a regular expression."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    r"""Train low-rank adapters of linear layers.

    Attributes:
        rank: Rank r; A has shape (r, d_in), B has shape (d_out, r).
        alpha: The update is multiplied by alpha / rank; none: alpha = rank.
        dropout: Dropout probability of the input of the adapters; the frozen layers get the input unchanged.
        sites: Layers of a block to adapt: `l0` (token mixing), `l1` (MLP), `query_value` (the layers of
            queries and values, or the one that has both), `all_linear`, or regular expressions that must
            match the whole name of a linear layer within its block, e.g. `attn\.(qkv|proj)`.
        targets: Any layers of the network in place of `sites`, by PEFT's rules: a regular expression that
            matches their whole names, `all-linear`, or a list of names or ends of names. Linear layers,
            convolutions and embeddings can be adapted. None: what `sites` says; of a user's network in which
            it matches nothing, every linear layer, or every convolution where there is none.
        stem: Also adapt the patch embedding, as FedRA's released code does unintentionally; transformers
            only.
        train_head: Whether the head is trained too.
        residual: Add a dense matrix R to B A in every adapted layer. Clients receive R but never train it;
            `server.lora_agg=residual` and `stack_merge` store in it the part of an update that has a higher
            rank than the factors.
        freeze_a: Keep A at its start value, which is the same for all clients, and train and send B only, so
            that the mean of the factors gives the mean of the products B A.
        core: Keep A and B at their start values, which are the same for all clients and have orthonormal rows
            and columns, and train a matrix C of shape (r, r) between them: the update is alpha / rank * B C A
            (algorithm fed_sb).
        core_start: Start values under `core`: `gradient`: singular vectors and values of what one step of
            full training would change, estimated with a batch of each client (`rayfed.engine.setup`);
            `random`: A and B are random, and C is zero.
    """

    offers: ClassVar[frozenset[str]] = frozenset({"lora"})

    rank: Count = 8
    alpha: Positive | None = None
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    sites: tuple[str, ...] = ("l0", "l1")
    targets: str | tuple[str, ...] | None = None
    stem: bool = False
    train_head: bool = True
    residual: bool = False
    freeze_a: bool = False
    core: bool = False
    core_start: Literal["gradient", "random"] = "gradient"

    def apply(self, model: Backbone) -> Backbone:
        targets = self.pattern(model)
        self._check_rank(model, targets)
        freeze(model, self.train_head)
        adapt(model.net, targets, self.rank, self._alpha, self.dropout)
        for name, parameter in model.net.named_parameters():
            if self.freeze_a and ".lora_A." in name:
                parameter.requires_grad_(False)
        for layer in _adapted(model) if self.core else ():
            _add_core(layer)
        if self.residual:
            for layer in _adapted(model):
                _add_residual(layer)
        return model

    def adapter_files(
        self, params: Mapping[str, Tensor], model_name: str, names: LibraryNames | None = None
    ) -> dict[str, bytes]:
        """The trained adapters in PEFT's format, for `PeftModel.from_pretrained(net, folder)`.

        There are no files under `freeze_a`, `residual` and `core`, or where A or B stays at the clients,
        because what was sent is not the whole update.

        Args:
            params: Final tensors by global name.
            model_name: Name of the adapted model; stored in adapter_config.json.
            names: Names in the library of a model of transformers, whose trained classifier is saved too, for
                `PeftModel.from_pretrained(AutoModelForSequenceClassification...)`; None: another model.

        Returns:
            The contents of adapter_config.json and adapter_model.safetensors, by name of the file.
        """
        from safetensors.torch import save

        factors = {n: v.contiguous() for n, v in params.items() if n.endswith(LEAVES)}
        layers = sorted({name.rpartition(".")[0] for name in factors})
        if len(factors) != 2 * len(layers) or not layers or self.residual:
            return {}
        about: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": model_name,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self._alpha,
            "lora_dropout": self.dropout,
            "bias": "none",
            "fan_in_fan_out": False,
            "modules_to_save": None,
        }
        if names is not None:
            about |= {"base_model_name_or_path": names.model, "task_type": names.task}
            about["fan_in_fan_out"] = names.transposed
            layers = [names.of(layer) for layer in layers]
            heads = {n: v.contiguous() for n, v in params.items() if n.startswith("head.")}
            if heads:
                about["modules_to_save"] = names.saved
        about["target_modules"] = "|".join(map(re.escape, layers))
        place = (lambda name: name) if names is None else names.of
        leaf = {name: "" if "_embedding_" in name else ".weight" for name in factors}
        named = {f"base_model.model.{place(name)}{leaf[name]}": value for name, value in factors.items()}
        if names is not None:
            named |= {f"base_model.model.{names.of(name)}": value for name, value in heads.items()}
        return {
            "adapter_config.json": json.dumps(about, indent=2, sort_keys=True).encode(),
            "adapter_model.safetensors": save(named, metadata={"format": "pt"}),
        }

    @property
    def _alpha(self) -> float:
        return self.rank if self.alpha is None else self.alpha

    def pattern(self, model: Backbone) -> str:
        """A regular expression that matches the full names of the adapted layers.

        PEFT would also accept a suffix such as `proj`, but that matches the patch embedding too.

        Raises:
            ConfigError: The model has no uniform blocks, a site matches none of their linear layers, or
                `stem` is set and there is no patch embedding.
        """
        if self.targets is not None:
            return exactly(named_layers(model, self.targets, ADAPTED))
        if model.is_own and self.sites == Lora.sites and not self._finds_sites(model):
            linear = list(called_layers(model.net, nn.Linear))
            return exactly(linear or named_layers(model, r".*", CONVOLUTIONS))
        targets = in_every_block(chosen_layers(model, self.sites, {**LAST, **SITES}))
        if not self.stem:
            return targets
        if not any(re.fullmatch(STEM, name) for name, _ in model.net.named_modules()):
            raise ConfigError(f"tuning.stem: {model.label!r} has no patch_embed.proj; set tuning.stem=false")
        return f"{targets}|{STEM}"

    def _finds_sites(self, model: Backbone) -> bool:
        """Whether the network has blocks in which `sites` finds layers."""
        try:
            return bool(in_every_block(chosen_layers(model, self.sites, LAST)))
        except ConfigError:
            return False

    def _check_rank(self, model: Backbone, targets: str) -> None:
        """Raise ConfigError if the rank is above the rank of every adapted weight matrix."""
        adapted = [m.weight for n, m in model.net.named_modules() if re.fullmatch(targets, n)]
        most = max(min(weight.flatten(1).shape) for weight in adapted)
        if self.rank > most:
            raise ConfigError(
                f"tuning.rank: {self.rank} is more than the rank of every adapted layer of {model.label!r}; "
                f"give 1..{most}, or use tuning=full"
            )


def _adapted(model: Backbone) -> list[Any]:
    """The adapted linear layers; adapted convolutions are left out, because a residual is a matrix."""
    return [module for module in model.net.modules() if isinstance(module, AdaptedLinear)]


def _add_residual(layer: Any) -> None:
    """Register R = 0, shape (d_out, d_in), and add alpha / rank * R x to the output of the layer."""
    weight = layer.base_layer.weight
    layer.register_buffer(RESIDUAL_LEAF, torch.zeros_like(weight, requires_grad=False))

    def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + module.scaling["default"] * F.linear(inputs[0], module.lora_R)

    layer.register_forward_hook(add)


def _add_core(layer: Any) -> None:
    """Put a trained matrix C, shape (r, r), between A and B, which are made orthonormal and frozen.

    C starts as zero, so that the tuned model first computes what the frozen one does; `core_start=gradient`
    sets other start values when the data is there.
    """
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    core = nn.Linear(a.out_features, a.out_features, bias=False, device=a.weight.device, dtype=a.weight.dtype)
    for factor in (a, b):
        factor.requires_grad_(False)
        if not factor.weight.is_meta:
            nn.init.orthogonal_(factor.weight)
    nn.init.zeros_(core.weight)
    layer.lora_B["default"] = nn.Sequential(OrderedDict(core=core, last=b))


@dataclass(frozen=True)
class CoreSite:
    """A layer with a core.

    Attributes:
        layer: Name of the layer in the model.
        a, b, c: Names of the factors A and B and of the core in the model.
        rank: Rank r.
        scale: alpha / rank.
    """

    layer: str
    a: str
    b: str
    c: str
    rank: int
    scale: float


def core_sites(model: Backbone) -> Iterator[CoreSite]:
    """The layers of a model that have a core."""
    names = {module: name for name, module in model.named_modules()}
    for layer in _adapted(model):
        if isinstance(layer.lora_B["default"], nn.Sequential):
            first = f"{names[layer]}.lora_A.default.weight"
            last, core = (f"{names[layer]}.lora_B.default.{part}.weight" for part in ("last", "core"))
            yield CoreSite(names[layer], first, last, core, layer.r["default"], layer.scaling["default"])


LoRA = Lora
TUNING = Lora
