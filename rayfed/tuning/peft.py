"""Any configuration of PEFT whose tuner puts modules into a network: DoRA, PiSSA, VeRA, OFT, LoHa and others.

Mangrulkar et al., PEFT: State-of-the-art Parameter-Efficient Fine-Tuning methods, 2022 [mangrulkar2022peft].
Its released code chooses the layers, by their names in the network's library, makes the modules and computes
them.

Start values are drawn once, from the seed of the experiment. A start that changes frozen weights, as that of
PiSSA and OLoRA, changes the experiment's copy of them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError, one_line, shown, unknown
from rayfed.models.backbone import Backbone
from rayfed.models.language import LibraryNames
from rayfed.models.library_form import as_in_library, head_names, name_of_head
from rayfed.models.named_tensors import PEFT_ADAPTER, global_name
from rayfed.tuning.base import freeze
from rayfed.tuning.sites import called_layers, exactly, reads_qkv
from rayfed.types import Params
from rayfed.user_files import is_folder, read_file, user_path

FILE = "adapter_config.json"
"""Name under which PEFT writes a config."""

ALL_LINEAR = "all-linear"
"""Value of `target_modules` for all linear layers; those that an attention reads are left out."""

OF_THE_FILE = (
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("runtime_config", "task_type"),
)
"""Keys about the network and the library with which a config was written, not about the adapter."""

NO_LAYERS = (
    "puts no modules into layers of the network; use a config that does, such as LoraConfig or IA3Config"
)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE"),
            "ADAPTION_PROMPT",
        ),
        "learns a prompt; use a config that changes layers, such as LoraConfig or IA3Config, or for images "
        "tuning=visual_prompt",
    ),
    "ADALORA": "needs a call of PEFT's rank allocator after every step; use LoraConfig with rank_pattern",
    **dict.fromkeys(("XLORA", "POLY"), "needs adapters or tasks that were prepared before; use LoraConfig"),
    **dict.fromkeys(("SHADOW", "SUPERTUNING"), NO_LAYERS),
    **dict.fromkeys(
        ("FROD", "TINYLORA"), "has fixed tensors that PEFT's files do not have by layer; use VeraConfig"
    ),
}
"""Types that cannot be trained here, and why."""

TRANSPOSED = (
    *("LORA", "VERA", "PVERA", "IA3", "FOURIERFT", "RANDLORA", "WAVEFT", "GRALORA", "HIRA", "DEFT"),
    *("VBLORA", "UNILORA"),
)
"""Types for layers whose weights are transposed in the library, as those of GPT-2 are."""

OF_DATA = ("eva", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights` that need data, or a quantized network, before the adapter is made."""

MUTATING = ("pissa", "olora")
"""Beginnings of those that change the frozen weights."""

RUN_TIME = {
    "target_parameters": "write target_modules",
    "layer_replication": "leave it out",
    "trainable_token_indices": "leave it out",
    **dict.fromkeys(("megatron_config", "alora_invocation_tokens", "arrow_config"), "leave it out"),
    "monteclora_config": "leave it out",
}
"""Keys of LoraConfig that change more than layers of the network, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Peft:
    """Train what a configuration of PEFT adds to the network, and the head.

    Attributes:
        config: The configuration as PEFT writes it: a file, a folder with `adapter_config.json`, or its keys,
            `peft_type` among them; by default LoRA of all linear layers. In Python `tuning=` takes the object
            itself, `peft.LoraConfig(...)`.
        train_head: Whether a new head is trained too, whatever `modules_to_save` says.
    """

    offers: ClassVar[frozenset[str]] = frozenset()
    fixed_ends: ClassVar[tuple[str, ...]] = tuple(f".{PEFT_ADAPTER}{end}" for end in ("", ".weight", ".bias"))
    needs_skeleton: ClassVar[bool] = True

    config: dict[str, Any] | str = field(
        default_factory=lambda: {"peft_type": "LORA", "target_modules": ALL_LINEAR}
    )
    train_head: bool = True

    def __post_init__(self) -> None:
        """Read the file, and keep the values that differ from PEFT's defaults.

        Raises:
            ConfigError: There is no such file or type, or it cannot be trained here.
        """
        given = read(self.config) if isinstance(self.config, str) else self.config
        object.__setattr__(self, "config", plain_config(made(given)))

    def apply(self, model: Backbone) -> Backbone:
        config = made(self.config)
        freeze(model, self.train_head)
        saved = getattr(config, "modules_to_save", None)
        if saved is not None:
            config.modules_to_save = _without_head(model, saved) or None
        on_meta = torch.empty(0).device.type == "meta"
        if on_meta:
            _leave_out_start(config)
        elif any(p.is_meta for p in model.net.parameters()):  # a user's network where its values are not
            model.net.to_empty(device="cpu").apply(_fill)
        if getattr(model.net, "transposed", False) and self._type not in TRANSPOSED:
            raise ConfigError(
                f"tuning.config: PEFT has no {self._type} for the layers of {model.label!r}, whose weights "
                f"are transposed; choose from {', '.join(TRANSPOSED)}"
            )
        with as_in_library(model) as root:
            if getattr(config, "target_modules", None) == ALL_LINEAR:
                config.target_modules = exactly(list(called_layers(root, nn.Linear)))
            self._inject(model, root, config, on_meta)
        _check_blocks(model)
        return model

    def _inject(self, model: Backbone, root: nn.Module, config: Any, on_meta: bool) -> None:
        """Let PEFT put its modules into a network. Args: root: the network as it is in its library."""
        from peft import PEFT_TYPE_TO_TUNER_MAPPING

        make = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
        before = {id(module) for module in root.modules()}
        try:
            # What PEFT registers nowhere, such as indices, has values also where the parameters have none.
            with warnings.catch_warnings(), torch.device("cpu"):
                warnings.simplefilter("ignore")
                make(root, config, adapter_name=PEFT_ADAPTER, low_cpu_mem_usage=on_meta)
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError, StopIteration) as err:
            names = ", ".join(_names_of_layers(root, before)[:MOST_NAMED])
            raise ConfigError(
                f"tuning.config: {self._type} does not fit {model.label!r} ({one_line(err)[:MOST_QUOTED]}); "
                f"its linear layers are: {names}"
            ) from err
        del root.peft_config
        _check_called(root)

    @property
    def _type(self) -> str:
        assert isinstance(self.config, dict)
        return str(self.config["peft_type"])

    def adapter_files(
        self,
        params: Mapping[str, Tensor],
        model_name: str,
        skeleton: Callable[[], Backbone],
        names: LibraryNames | None = None,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> dict[str, bytes]:
        """The trained adapter in PEFT's format, for `PeftModel.from_pretrained(net, folder)`.

        An adapter whose start changed the frozen weights becomes one of LoRA with twice the rank, which has
        the difference to the start, so that it fits the network as it was.

        Args:
            params: Final tensors by global name.
            model_name: Name of the adapted model; stored in adapter_config.json.
            skeleton: Makes the tuned model, with or without values.
            names: Names in the library of a model of transformers; None: another model.
            fixed: Start values of the tensors of the adapter, those with `fixed_ends`.

        Returns:
            The contents of adapter_config.json and adapter_model.safetensors, by name of the file.
        """
        from peft import get_peft_model_state_dict
        from safetensors.torch import save

        model = skeleton()
        config = made(self.config)
        start = dict(fixed or {})
        with as_in_library(model) as root:
            adapted = _adapted(root)
            scaled = [name for name in adapted if getattr(root.get_submodule(name), "is_feedforward", False)]
            holder = nn.Module()
            holder.base_model = nn.Module()
            holder.base_model.model = root
            holder.peft_config = {PEFT_ADAPTER: config}  # type: ignore[assignment]
            found, begun = (
                get_peft_model_state_dict(
                    holder, _by_name_in(holder, model, each), PEFT_ADAPTER, save_embedding_layers=False
                )
                for each in ({**start, **params}, start)
            )
        if self._mutates:
            found = _as_difference(config, found, begun)
        config.target_modules = adapted
        if getattr(config, "feedforward_modules", None):
            config.feedforward_modules = scaled
        for key in ("exclude_modules", "layers_to_transform", "layers_pattern"):
            if hasattr(config, key):
                setattr(config, key, None)
        heads = head_names(model)
        trained = {name: value for name, value in params.items() if name.rpartition(".")[0] in heads}
        found |= {f"base_model.model.{name_of_head(heads, name)}": value for name, value in trained.items()}
        if trained and hasattr(config, "modules_to_save"):
            wholes = {heads[name.rpartition(".")[0]] for name in trained}
            inside = {name.partition(".")[0] if names else name for name in wholes}
            config.modules_to_save = sorted(inside | set(_without_head(model, config.modules_to_save or [])))
        config.base_model_name_or_path = model_name if names is None else names.model
        config.task_type = None if names is None else names.task
        config.inference_mode = True
        return {
            FILE: json.dumps(_as_lists(config.to_dict()), indent=2, sort_keys=True).encode(),
            "adapter_model.safetensors": save(
                {name: value.detach().contiguous().clone() for name, value in found.items()},
                metadata={"format": "pt"},
            ),
        }

    def merge(self, net: nn.Module) -> int:
        """Put what PEFT added into the layers of a network, which take their places again.

        Args:
            net: The network, which is changed; its weights are its own.

        Returns:
            Number of layers that had an adapter.

        Raises:
            ConfigError: PEFT cannot merge this type.
        """
        adapted = _adapted(net)
        for name in adapted:
            layer: Any = net.get_submodule(name)
            try:
                with torch.no_grad():
                    layer.merge(safe_merge=True)
            except Exception as err:  # tuners raise almost anything
                raise ConfigError(
                    f"merged: PEFT cannot merge {self._type} ({one_line(err)[:MOST_QUOTED]}); leave it out"
                ) from err
            net.set_submodule(name, layer.get_base_layer())
        for name, module in list(net.named_modules()):
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                net.set_submodule(name, module.modules_to_save[PEFT_ADAPTER])
        return len(adapted)

    @property
    def _mutates(self) -> bool:
        """Whether the start changes frozen weights."""
        assert isinstance(self.config, dict)
        return str(self.config.get("init_lora_weights", "")).lower().startswith(MUTATING)


MOST_NAMED = 8
"""Layers that a message lists."""

MOST_QUOTED = 200
"""Characters of a message of PEFT that are quoted."""


def read(path: str) -> dict[str, Any]:
    """The keys of a file that PEFT wrote, or of `adapter_config.json` in a folder.

    Raises:
        ConfigError: It cannot be read.
    """
    file = user_path(path, "tuning.config")
    return read_file(file / FILE if is_folder(file) else file, "tuning.config")


def is_config(value: object) -> bool:
    """Whether an object is a configuration of PEFT, which is not imported for it."""
    return any(
        f"{kind.__module__}.{kind.__name__}" == "peft.config.PeftConfig" for kind in type(value).__mro__
    )


def plain_config(config: Any) -> dict[str, Any]:
    """The values of a configuration that differ from the defaults of its type, as plain values."""
    kind = config.peft_type
    given = _as_lists(config.to_dict())
    usual = _as_lists(type(config)().to_dict())
    own = {key: value for key, value in given.items() if key not in OF_THE_FILE and value != usual.get(key)}
    return {"peft_type": getattr(kind, "value", str(kind)), **own}


def made(given: Mapping[str, Any] | str) -> Any:
    """The configuration of PEFT with these keys.

    Raises:
        ConfigError: A key or a type does not exist, a value is wrong, or it cannot be trained here.
    """
    with torch.device("cpu"):  # some versions compute while they are imported: `skeleton` has no values
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    assert not isinstance(given, str)
    known = {str(getattr(kind, "value", kind)): each for kind, each in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = given.get("peft_type")
    if kind is None:
        raise ConfigError(
            f"tuning.config: peft_type is missing in {shown(dict(given))}; write it as PEFT does, as LORA"
        )
    if str(kind) in REFUSED:
        raise ConfigError(f"tuning.config: peft_type={kind} {REFUSED[str(kind)]}")
    if str(kind) not in known:
        raise ConfigError(unknown("tuning.config.peft_type", str(kind), sorted(known)))
    keys = {field.name for field in dataclasses.fields(known[str(kind)])}
    values = {key: value for key, value in given.items() if key not in OF_THE_FILE}
    if wrong := sorted(set(values) - keys - {"peft_type"}):
        raise ConfigError(unknown("tuning.config", wrong[0], sorted(keys)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = known[str(kind)](**copy.deepcopy({k: v for k, v in values.items() if k != "peft_type"}))
    except (ValueError, TypeError, ImportError) as err:
        raise ConfigError(f"tuning.config: {kind}: {one_line(err)[:MOST_QUOTED]}; change the config") from err
    _check(config)
    return config


def _check(config: Any) -> None:
    """Raise ConfigError if a configuration changes more than layers, or its start needs data."""
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.lower().startswith(OF_DATA):
        raise ConfigError(
            f"tuning.config: init_lora_weights={start!r} needs data or a quantized network before the run; "
            f"use true, gaussian, pissa, olora or orthogonal"
        )
    for key, instead in RUN_TIME.items():
        if getattr(config, key, None):
            raise ConfigError(f"tuning.config: {key} is not supported; {instead}")


def _as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with sorted lists in place of sets, and texts in place of enumerations."""

    def simple(value: Any) -> Any:
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, Mapping):
            return {key: simple(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [simple(each) for each in value]
        return getattr(value, "value", value)

    return {key: simple(value) for key, value in values.items()}


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    """Give the tensors of a module any values, which `attach` replaces, so that starts can be computed."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.normal_()


def _leave_out_start(config: Any) -> None:
    """Let a network without values get the modules of a start that would compute with the values."""
    start = getattr(config, "init_lora_weights", None)
    if isinstance(start, str) and start.lower().startswith((*MUTATING, "orthogonal")):
        config.init_lora_weights = False


def _without_head(model: Backbone, names: list[str]) -> list[str]:
    """The names of modules that are not parts of the head.

    Raises:
        ConfigError: One is the head of a language model, which has its weights in common with other layers.
    """
    heads = set(head_names(model).values())
    inside = {name for name in names if name in heads or any(each.startswith(f"{name}.") for each in heads)}
    if inside and not model.has_new_head:
        raise ConfigError(
            f"tuning.config: modules_to_save has {sorted(inside)[0]!r}, the head of a language model, which "
            f"only tuning=full trains; leave it out"
        )
    return [name for name in names if name not in inside]


def _names_of_layers(root: nn.Module, known: set[int]) -> list[str]:
    """Names of the linear layers that a network had before."""
    return [n for n, m in root.named_modules() if isinstance(m, nn.Linear) and id(m) in known]


def _check_called(root: nn.Module) -> None:
    """Raise ConfigError if a layer was adapted whose weights an attention reads without calling it."""
    adapted = _adapted(root)
    for name, module in root.named_modules():
        if isinstance(module, nn.MultiheadAttention) or reads_qkv(module):
            inside = [each for each in adapted if each.startswith(f"{name}.") or each == name]
            read = [
                each for each in inside if isinstance(module, nn.MultiheadAttention) or each.endswith(".qkv")
            ]
            if read:
                raise ConfigError(
                    f"tuning.config: {read[0]} is part of an attention that reads its weights without "
                    f"calling it, so that an adapter would have no effect; choose other target_modules"
                )


def _check_blocks(model: Backbone) -> None:
    """Raise ConfigError if blocks, which clients may hold one without the other, train a tensor together."""
    blocks = model.stack.children() if model.num_blocks else ()
    seen: set[int] = set()
    for block in blocks:
        own = {id(p) for p in block.parameters() if p.requires_grad}
        if own & seen:
            raise ConfigError(
                f"tuning.config: it trains tensors that several blocks of {model.label!r} have in common, "
                f"and blocks are sent one by one; use a config without them, such as LoraConfig or VeraConfig"
            )
        seen |= own


def _adapted(root: nn.Module) -> list[str]:
    """Names of the layers that have an adapter."""
    return [n for n, m in root.named_modules() if hasattr(m, "base_layer") and hasattr(m, "active_adapters")]


def _as_difference(config: Any, found: Mapping[str, Tensor], begun: Mapping[str, Tensor]) -> Params:
    """The adapter of LoRA that has the difference to the start, B A - B0 A0, at twice the rank.

    Args:
        config: Is changed to that of this adapter; its scale stays.
        found, begun: The final tensors and those of the start, by their names in PEFT's file.
    """
    larger = 2**0.5 if config.use_rslora else 2
    config.init_lora_weights = True
    config.r, config.lora_alpha = 2 * config.r, larger * config.lora_alpha
    config.rank_pattern = {key: 2 * rank for key, rank in (config.rank_pattern or {}).items()}
    config.alpha_pattern = {key: larger * alpha for key, alpha in (config.alpha_pattern or {}).items()}
    signs = {"lora_A.weight": (1, 0), "lora_B.weight": (-1, 1)}
    joined = dict(found)
    for name, value in found.items():
        for end, (sign, across) in signs.items():
            if name.endswith(end):
                joined[name] = torch.cat([value, sign * begun[name]], dim=across)
    return joined


def _by_name_in(holder: nn.Module, model: Backbone, values: Mapping[str, Tensor]) -> Params:
    """Values by the names that tensors have in a model of PEFT.

    Args:
        holder: A module with the network as `base_model.model`.
        model: The backbone with the same modules.
        values: By global name.
    """
    names = {entry.path: name for name, entry in model.tensors().items()}
    known: dict[tuple[int, str], Tensor] = {}
    for prefix, module in model.named_modules():
        for leaf in (*module._parameters, *module._buffers):
            path = f"{prefix}.{leaf}"
            value = values.get(names.get(path, global_name(path)))
            if value is not None:
                known[id(module), leaf] = value
    found = {}
    for prefix, module in holder.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            if (id(module), leaf) in known:
                found[f"{prefix}.{leaf}"] = known[id(module), leaf]
                if leaf == PEFT_ADAPTER:  # tensors that all layers share have names without a layer, too
                    found.setdefault(
                        f"base_model.{prefix.rpartition('.')[2]}.{leaf}", known[id(module), leaf]
                    )
    return found


TUNING = Peft
