"""LoRA: low-rank updates of linear layers in every block, and the head.

Hu et al., LoRA, ICLR 2022 [hu2022lora], Eq. 3, as PEFT implements it: y = W x + b + alpha / rank * B A
dropout(x). A starts Kaiming-uniform and B as zero, so that the tuned model first computes what the frozen one
does. The update is never merged into W.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.backbone import Backbone
from rayfed.models.language import SITES, LibraryNames
from rayfed.models.lora_layer import ADAPTED, CONVOLUTIONS, AdaptedLinear, adapt
from rayfed.models.named_tensors import RESIDUAL_LEAF
from rayfed.seeds import derive
from rayfed.tuning.base import freeze
from rayfed.tuning.sites import LAST, called_layers, chosen_layers, exactly, in_every_block, named_layers
from rayfed.types import Count, Positive

LEAVES = (".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B")
"""Ends of the global names of factors."""
FROZEN = (".lora_A", ".lora_embedding_A")
"""Ends of those that `freeze_a` keeps at their start values."""

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
        personal: Add a second adapter of linear layers, whose output is mixed with that of the first one by a
            weight that the method sets (`rayfed.tuning.lora.mix`), and is 0 before (algorithm feddpa).
        sparse: Add a trained matrix S to B A in linear layers (algorithm slora). Most of its entries stay 0;
            the others are at the same random places in every experiment.
        density: Share of the entries of S that are trained.
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
    personal: bool = False
    sparse: bool = False
    density: Annotated[float, Gt(0), Le(1)] = 0.01

    def apply(self, model: Backbone) -> Backbone:
        targets = self.pattern(model)
        self._check_rank(model, targets)
        freeze(model, self.train_head)
        adapt(model.net, targets, self.rank, self._alpha, self.dropout)
        for name, parameter in model.net.named_parameters():
            if self.freeze_a and ".lora_A." in name:
                parameter.requires_grad_(False)
        self._extend(model)
        return model

    def _extend(self, model: Backbone) -> None:
        """Add to the adapters of linear layers what the options ask for."""
        ways: dict[Callable[[Any], None], bool] = {
            _add_core: self.core,
            _add_residual: self.residual,
            _add_personal: self.personal,
            partial(_add_sparse, share=self.density): self.sparse,
        }
        for add in (add for add, wanted in ways.items() if wanted):
            for layer in _adapted_layers(model):
                add(layer)
        if self.personal:
            model.register_forward_pre_hook(_weigh)

    def adapter_files(
        self,
        params: Mapping[str, Tensor],
        model_name: str,
        names: LibraryNames | None = None,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> dict[str, bytes]:
        """The trained adapters in PEFT's format, for `PeftModel.from_pretrained(net, folder)`.

        There are no files under `residual` and `core`, where A or B stays at the clients, or with entries of
        `sparse`, because what was sent is not the whole update, or is more than factors.

        Args:
            params: Final tensors by global name.
            model_name: Name of the adapted model; stored in adapter_config.json.
            names: Names in the library of a model of transformers, whose trained classifier is saved too, for
                `PeftModel.from_pretrained(AutoModelForSequenceClassification...)`; None: another model.
            fixed: Tensors of the adapters that stayed at their start values, those with `fixed_ends`.

        Returns:
            The contents of adapter_config.json and adapter_model.safetensors, by name of the file.
        """
        from safetensors.torch import save

        all_of_them = {**(fixed or {}), **params}
        factors = {n: v.contiguous() for n, v in all_of_them.items() if n.endswith(LEAVES)}
        layers = sorted({name.rpartition(".")[0] for name in factors})
        if len(factors) != 2 * len(layers) or not layers or self.residual:
            return {}
        if any(name.endswith(SPARSE) and value.any() for name, value in params.items()):
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
                about["modules_to_save"] = names.modules_to_save
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
    def fixed_ends(self) -> tuple[str, ...]:
        """Ends of the global names of tensors that adapters have, and that stay at their start values."""
        return FROZEN if self.freeze_a else ()

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


def _adapted_layers(model: Backbone) -> list[Any]:
    """The adapted linear layers; adapted convolutions are left out, because a residual is a matrix."""
    return [module for module in model.net.modules() if isinstance(module, AdaptedLinear)]


def _add_residual(layer: Any) -> None:
    """Register R = 0, shape (d_out, d_in), and add alpha / rank * R x to the output of the layer."""
    weight = layer.base_layer.weight
    layer.register_buffer(RESIDUAL_LEAF, torch.zeros_like(weight, requires_grad=False))

    def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + module.scaling["default"] * F.linear(inputs[0], module.lora_R)

    layer.register_forward_hook(add)


def _add_personal(layer: Any) -> None:
    """Add factors with LoRA's start values, own_A (r, d_in) and own_B (d_out, r), whose weight is 0 now."""
    rank, weight = layer.r["default"], layer.base_layer.weight
    with weight.device if weight.is_meta else torch.device("cpu"):
        layer.own_A = nn.Linear(layer.in_features, rank, bias=False).to(weight.device, weight.dtype)
        layer.own_B = nn.Linear(rank, layer.out_features, bias=False).to(weight.device, weight.dtype)
    nn.init.kaiming_uniform_(layer.own_A.weight, a=math.sqrt(5))
    nn.init.zeros_(layer.own_B.weight)
    # Before a method sets a weight, zeros are added, so that a check finds that the output depends on them.
    layer.own_weight, layer.whole_scale = None, layer.scaling["default"]

    def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, own = inputs[0], module.own_weight
        if not isinstance(own, Tensor):
            if own == 0:
                return output
            low = module.own_A(module.lora_dropout["default"](x.to(module.own_A.weight.dtype)))
            return output + (module.whole_scale * (own or 0.0) * module.own_B(low)).to(output.dtype)
        rows = own.repeat_interleave(len(x) // len(own)).view(-1, *[1] * (x.ndim - 1))
        x = x.to(module.own_A.weight.dtype)
        apart = module.own_B(module.own_A(x)) - module.lora_B["default"](module.lora_A["default"](x))
        return output + (module.whole_scale * rows * apart).to(output.dtype)

    layer.register_forward_hook(add)


def mix(model: Backbone, own: float | Tensor) -> None:
    """Let adapted layers compute W x + scale ((1 - w) B A x + w B' A' x), with B' A' of `personal`.

    Args:
        own: The weight w: a number, or one for each row of the next batch, shape (B,), without dropout.
    """
    for layer in _adapted_layers(model):
        layer.own_weight = own
        layer.scaling["default"] = layer.whole_scale * (1 - own if isinstance(own, float) else 1)


WEIGH = "weigh"
"""Attribute of a model with `personal`: a function that calls `mix` for a batch before it is scored."""


def _weigh(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Call the function in `WEIGH` before a batch in evaluation mode."""
    weigh = vars(model).get(WEIGH)
    if weigh is not None and not model.training:
        weigh(model, inputs[0])


SPARSE = ".lora_S"
"""Ends of the global names of the entries of sparse matrices."""


def use_sparse(model: Backbone, on: bool) -> None:
    """Let adapted layers add their sparse matrix, or leave it out where it is 0, which takes no time."""
    for layer in _adapted_layers(model):
        layer.has_sparse = on


@cache
def places(rows: int, columns: int, number: int) -> Tensor:
    """Places of the entries of a sparse matrix in its rows, one after the other: ascending, int64.

    They depend on these numbers only, so that a server knows them.
    """
    drawn = torch.Generator().manual_seed(derive(0, "sparse", rows, columns))
    return torch.randperm(rows * columns, generator=drawn)[:number].sort()[0]


def dense(entries: Tensor, rows: int, columns: int, at: Tensor | None = None) -> Tensor:
    """The matrix S, shape (rows, columns), with these entries at `places`, which `at` has on the device."""
    flat = torch.zeros(rows * columns, dtype=entries.dtype, device=entries.device)
    at = places(rows, columns, len(entries)) if at is None else at
    return flat.scatter(0, at, entries).view(rows, columns)


def _add_sparse(layer: Any, share: float) -> None:
    """Register the trained entries of S, all 0, and add alpha / rank * S x to the output of the layer."""
    weight = layer.base_layer.weight
    number = max(1, round(share * weight.numel()))
    layer.lora_S = nn.Parameter(torch.zeros(number, dtype=weight.dtype, device=weight.device))
    layer.has_sparse, layer.sparse_at = True, None

    def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not module.has_sparse:
            return output
        shape = module.out_features, module.in_features
        if module.sparse_at is None or module.sparse_at.device != module.lora_S.device:
            module.sparse_at = places(*shape, len(module.lora_S)).to(module.lora_S.device)
        matrix = dense(module.lora_S, *shape, module.sparse_at)
        added = F.linear(inputs[0].to(matrix.dtype), matrix)
        return output + (module.scaling["default"] * added).to(output.dtype)

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
    for layer in _adapted_layers(model):
        if isinstance(layer.lora_B["default"], nn.Sequential):
            first = f"{names[layer]}.lora_A.default.weight"
            last, core = (f"{names[layer]}.lora_B.default.{part}.weight" for part in ("last", "core"))
            yield CoreSite(names[layer], first, last, core, layer.r["default"], layer.scaling["default"])


LoRA = Lora
TUNING = Lora
