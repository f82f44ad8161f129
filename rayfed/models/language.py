"""Models of transformers as backbones: encoders and decoders for classification, decoders as language models.

The blocks of a network are its layers, any of which can be left out. The names of their tensors begin with
`blocks.<j>.`, all others with `trunk.`. GPT-2 stores the weights of its linear layers transposed; they become
ordinary linear layers here, so that every tuning scheme finds them, and `fan_in_fan_out` says so in an
exported adapter.

A classifier has the layers of the library's own class for sequence classification. It reads the first token
(of BERT after the pooler), or in decoders the last token that is no pad. It is new, and starts as there. The
head of a language model is the one it was pre-trained with.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rayfed.data.text import PAD, TYPE_BITS
from rayfed.data.tokenizer import TYPES, answered_or_cached, load_tokenizer
from rayfed.errors import ConfigError, one_line
from rayfed.models.blocks import BlockStack, has_uniform_blocks
from rayfed.models.model_config import HF, ModelConfig
from rayfed.objective import LANGUAGE_MODELING, TEXT_CLASSIFICATION, TEXT_REGRESSION

PACKAGED = ("text_mini", "lm_mini")
"""Models that ship with RayFed, as folders in rayfed/models/weights/."""

LENGTHS = {TEXT_CLASSIFICATION: 128, TEXT_REGRESSION: 128, LANGUAGE_MODELING: 512}
"""Most tokens of a text where `model.size` is not set, by task; a model that takes fewer takes those."""

SHIFTED = frozenset(
    ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "roberta-prelayernorm", "mpnet")
)
"""Types of models whose first position is behind the number of their pad token."""

SCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings with which a language model changes the output of its head, which is not done here.

They are refused before weights are read. Whatever else a model does is found by
`rayfed.engine.text_checks`.
"""


def is_text(name: str) -> bool:
    """Whether `model.name` is that of a model of transformers."""
    return name in PACKAGED or name.startswith(HF)


def source_of(config: ModelConfig) -> str:
    """The folder of a model, or its name on the hub."""
    if config.weights is not None:
        return str(Path(config.weights).expanduser())
    if config.name in PACKAGED:
        return str(files("rayfed.models") / "weights" / config.name)
    return config.name.removeprefix(HF)


class TextBlocks(BlockStack):
    """The layers of a transformer, which is iterated over or cut as the library does it.

    A block that is left out is the identity, at its place, because some networks choose the mask of a layer
    by its number.
    """

    def __iter__(self) -> Iterator[Any]:
        for j, block in self._modules.items():
            if int(j) in self.active:
                yield partial(self._run, int(j), block)
            else:
                yield _same

    def __getitem__(self, index: Any) -> Any:
        """All blocks as this container, whatever a slice from the first one says; or one block by index."""
        return self if isinstance(index, slice) else super().__getitem__(index)

    def _run(self, j: int, block: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forgets = self.checkpointing and torch.is_grad_enabled()
        run = partial(checkpoint, block, use_reentrant=False) if forgets else block
        tokens: Tensor = run(x, *args, **kwargs)
        if self._taps is not None and j in self._taps:
            self._taps[j] = tokens
        return tokens


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


class TextNet(nn.Module):
    """A network of transformers without its head; maps tokens (B, L), -1 for pads, to features.

    A number also has the type of its token (`rayfed.data.text.with_types`), which the network gets where it
    takes types.

    Attributes:
        blocks: Its layers.
        trunk: The rest of the network, which calls the blocks.
        pools: What the features are: `first` or `pooler`, those of the first token, shape (B, D); `last`:
            those of the last token that is no pad; `all`: those of every token, shape (B, L, D).
        path: Name of the list of layers within the network of the library.
        pad: Token that stands for pads, which no token of a text attends to.
        prefix: Name of the network within the library's whole model.
        transposed: Whether linear layers have their weights transposed in the library.
        types: Whether the library's network is given the types of the tokens.
    """

    def __init__(self, whole: Any, pools: str, types: bool = False) -> None:
        """Take the layers out of a network. Args: whole: the library's. pools, types: as of the class."""
        super().__init__()
        vars(self)["whole"] = whole  # no part of this network, whose layers it has too
        self.types = types
        self.prefix = str(whole.base_model_prefix)
        trunk = getattr(whole, self.prefix)
        self.transposed = _use_linear_layers(trunk)
        self.path, layers = _layers_of(trunk)
        self.blocks: Any = nn.ModuleList(layers)
        if has_uniform_blocks(self):
            self.blocks = TextBlocks(*layers)
        owner_name, _, leaf = self.path.rpartition(".")
        owner = trunk.get_submodule(owner_name)
        del owner._modules[leaf]
        vars(owner)[leaf] = self.blocks  # found by the library's code, and registered once, here
        self.trunk = trunk
        self.pools = pools
        pad = getattr(trunk.config, "pad_token_id", None)
        self.pad = int(pad) if isinstance(pad, int) and pad >= 0 else 0
        self._there: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Features of tokens, shape (B, D), or (B, L, D) under `all`."""
        there = x != PAD
        self._there = (there,)
        found = self.trunk(**self.named(x), attention_mask=self._mask(there))
        if self.pools == "pooler":
            pooled: Tensor = found.pooler_output
            return pooled
        return self.pooled(found.last_hidden_state)

    def named(self, x: Tensor) -> dict[str, Tensor]:
        """Tokens (B, L), and their types where the network takes them, by their names in the library."""
        there = x != PAD
        ids = {"input_ids": torch.where(there, x & (1 << TYPE_BITS) - 1, self.pad)}
        return ids | ({TYPES: torch.where(there, x >> TYPE_BITS, 0)} if self.types else {})

    def joined(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Tokens as this network takes them, shape (B, L), from what the library's tokenizer returns.

        Args:
            input_ids: Token ids, shape (B, L).
            attention_mask: 1 for tokens and 0 for pads, which stand behind the tokens; None: no pads.
            token_type_ids: Types of tokens; None: all are 0.

        Raises:
            ValueError: Pads stand before tokens.
        """
        types = 0 if token_type_ids is None else token_type_ids << TYPE_BITS
        if attention_mask is None:
            return input_ids + types
        there = attention_mask.bool()
        if bool((there[:, 1:] & ~there[:, :-1]).any()):
            raise ValueError('pads stand before tokens; set tokenizer.padding_side = "right"')
        return torch.where(there, input_ids + types, PAD)

    def _mask(self, there: Tensor) -> Tensor | None:
        """The mask that the library is given; it reads one of two dimensions, which has no values on meta."""
        if not there.is_meta:
            return there.long()
        rows, tokens = there.shape
        is_decoder = self.pools in ("last", "all")
        return torch.zeros(rows, 1, tokens, tokens, device=there.device) if is_decoder else None

    def pooled(self, hidden: Tensor) -> Tensor:
        """Features from the states of all tokens, shape (B, L, D), of the last batch."""
        if self.pools == "all":
            return hidden
        if self.pools == "pooler":
            features: Tensor = self.trunk.pooler(hidden)
            return features
        if self.pools == "first":
            return hidden[:, 0]
        (there,) = self._there
        last = there.sum(1).clamp(min=1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last]

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm after the last layer, where there is one; what an early exit reads goes through it."""
        for name in ("norm", "final_norm", "ln_f", "final_layer_norm"):
            if isinstance(layer := getattr(self.trunk, name, None), nn.Module):
                normed: Tensor = layer(hidden)
                return normed
        return hidden

    def forward_head(self, hidden: Tensor, pre_logits: bool = True) -> Tensor:
        """As of timm's networks: features from the states of all tokens."""
        return self.pooled(hidden)


class TextHead(nn.Linear):
    """A classifier as the library's: dropout, perhaps a hidden layer and an activation, and a linear layer.

    Attributes:
        plan: Its layers, and their names in the library.
        dense: The hidden layer; None: there is none.
        before, dropout: Dropout of its input, and of that of the last layer.
        activation: Name of the activation after the hidden layer: tanh, gelu or relu.
    """

    def __init__(self, plan: HeadPlan, classes: int) -> None:
        super().__init__(plan.width, classes, bias=plan.bias)
        self.plan = plan
        self.before = nn.Dropout(plan.before)
        self.dense = nn.Linear(plan.width, plan.width) if plan.activation else None
        self.activation = plan.activation
        self.dropout = nn.Dropout(plan.dropout)
        for layer in (self, self.dense):
            if layer is not None:
                nn.init.normal_(layer.weight, std=plan.std)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, input: Tensor) -> Tensor:
        """Logits (B, C) from features (B, D)."""
        if self.dense is not None:
            input = getattr(torch.nn.functional, self.activation)(self.dense(self.before(input)))
        return super().forward(self.dropout(input))


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """The layers of a classifier.

    Attributes:
        name: Name of its module in the library's class for sequence classification.
        width: Number of features.
        bias: Whether the last layer has a bias.
        activation: Activation after a hidden layer; empty: no hidden layer.
        before, dropout: Dropout before the hidden layer, and before the last one.
        std: Standard deviation of the start values.
        hidden: Name of the hidden layer in the library's class.
        last: Name of the last layer there.
    """

    name: str
    width: int
    bias: bool
    activation: str = ""
    before: float = 0.0
    dropout: float = 0.0
    std: float = 0.02
    hidden: str = ""
    last: str = ""


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A model of transformers that is built.

    Attributes:
        net: The network without head.
        width: Number of its features.
        size: Most tokens of a text.
        tokenizer: Folder or name of the model with its tokenizer.
        make_head: Makes the head for a number of classes.
        fill: Sets the weights of network and head to those of the folder or the hub.
        new_head: Whether the head is new, and not pre-trained.
    """

    net: TextNet
    width: int
    size: int
    tokenizer: str
    make_head: Callable[[int], nn.Linear]
    fill: Callable[[], None]
    new_head: bool


def build(config: ModelConfig, task: str | None) -> TextModel:
    """Build a model with random values, or without values on the meta device.

    Args:
        task: The task it is built for; None: what it was pre-trained for.

    Raises:
        ConfigError: There is no such model, or it is of a kind that is not supported.
    """
    settings = settings_of(config)
    is_decoder = _is_decoder(settings)
    task = task or (LANGUAGE_MODELING if is_decoder else TEXT_CLASSIFICATION)
    if task == LANGUAGE_MODELING:
        return _language_model(config, settings, is_decoder)
    if task not in (TEXT_CLASSIFICATION, TEXT_REGRESSION):
        raise ConfigError(
            f"model.name: {config.name!r} reads texts, and the data set is for {task}; choose a model that "
            f"`rayfed list models` shows, or a data set of texts"
        )
    whole = _random_model("AutoModelForSequenceClassification", config, settings)
    base = getattr(whole, whole.base_model_prefix)
    plan = _plan(whole, is_decoder)
    pools = "last" if is_decoder else ("pooler" if getattr(base, "pooler", None) is not None else "first")
    # For encoders, types of 0 are the same as none. Decoders add what stands for a type to what stands for
    # the token, so that they get types where their tokenizer gives some.
    types = TYPES in inspect.signature(base.forward).parameters
    if types and is_decoder:
        types = TYPES in load_tokenizer(source_of(config)).model_input_names
    net = TextNet(whole, pools, types)

    def fill() -> None:
        read = _read("AutoModelForSequenceClassification", config, settings)
        net.load_state_dict(TextNet(read, pools).state_dict())

    return TextModel(
        net=net,
        width=plan.width,
        size=_size(config, settings, task),
        tokenizer=source_of(config),
        make_head=partial(TextHead, plan),
        fill=fill,
        new_head=True,
    )


def _language_model(config: ModelConfig, settings: Any, is_decoder: bool) -> TextModel:
    if not is_decoder:
        raise ConfigError(
            f"model.name: {config.name!r} is of type {settings.model_type!r}, which is no decoder, and the "
            f"data set is for {LANGUAGE_MODELING}; choose a decoder such as lm_mini, or data with labels"
        )
    for name in SCALED:
        if getattr(settings, name, None) not in (None, 1.0):
            raise ConfigError(
                f"model.name: {config.name!r} changes the output of its head ({name}), which is not "
                f"supported; choose another model"
            )
    whole = _random_model("AutoModelForCausalLM", config, settings)
    head: nn.Linear = whole.get_output_embeddings()
    net = TextNet(whole, "all")

    def fill() -> None:
        read = _read("AutoModelForCausalLM", config, settings)
        of_head = read.get_output_embeddings()
        net.load_state_dict(TextNet(read, "all").state_dict())
        head.load_state_dict(of_head.state_dict())

    return TextModel(
        net=net,
        width=head.in_features,
        size=_size(config, settings, LANGUAGE_MODELING),
        tokenizer=source_of(config),
        make_head=lambda _: head,
        fill=fill,
        new_head=False,
    )


def settings_of(config: ModelConfig) -> Any:
    """The settings of a model as the library has them, with `model.options` put in.

    Raises:
        ConfigError: There is no such model, or it is gated, or it needs its own code.
    """
    from transformers import AutoConfig

    with _quiet(), answered_or_cached(source_of(config)):
        try:
            found = AutoConfig.from_pretrained(source_of(config), trust_remote_code=False, **config.options)
        except Exception as err:  # the library raises almost anything
            raise _missing(config, err) from err
    if getattr(found, "is_encoder_decoder", False):
        raise ConfigError(
            f"model.name: {config.name!r} has an encoder and a decoder, which is not supported; choose one "
            f"of the two, such as BERT, RoBERTa, GPT-2 or Llama"
        )
    found.pad_token_id = _pad_of(found)
    found.use_cache = False
    return found


def _pad_of(settings: Any) -> int:
    """The number of the pad token; where a model has none, 0, which no token attends to."""
    pad = getattr(settings, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else 0


def _is_decoder(settings: Any) -> bool:
    from transformers.models.auto import modeling_auto as auto

    kind = settings.model_type
    return (
        kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def _random_model(kind: str, config: ModelConfig, settings: Any) -> Any:
    """A model with random values, in float32."""
    import transformers

    with _quiet():
        try:
            return getattr(transformers, kind).from_config(settings, dtype=torch.float32)
        except (ValueError, TypeError, KeyError, AttributeError) as err:
            raise ConfigError(
                f"model.name: {config.name!r} cannot be built by {kind}: {one_line(err)[:200]}"
            ) from err


def _read(kind: str, config: ModelConfig, settings: Any) -> Any:
    """A model with its published values, in float32, whatever the type in which they are stored."""
    import transformers

    with _quiet(), answered_or_cached(source_of(config)):
        try:
            return getattr(transformers, kind).from_pretrained(
                source_of(config), config=settings, dtype=torch.float32, trust_remote_code=False
            )
        except Exception as err:  # the library raises almost anything
            raise _missing(config, err) from err


UNANSWERED = ("couldn't connect", "cannot reach", "connection error", "offline mode", "localentrynotfound")
"""Words in errors of the library where the hub does not answer and its cache does not have the model."""


def _missing(config: ModelConfig, err: Exception) -> ConfigError:
    reason = one_line(err).partition(" If this is a private repository")[0].partition("'https:")[0][:200]
    name = source_of(config)
    if Path(name).is_absolute() and not Path(name).is_dir():
        return ConfigError(
            f"model.name: the folder {name} does not exist; give one that save_pretrained wrote"
        )
    if any(words in f"{type(err).__name__} {err}".lower() for words in UNANSWERED):
        reason = "the hub does not answer, and its cache does not have the model"
    if "gated" in str(err).lower() or "401" in str(err) or "403" in str(err):
        return ConfigError(
            f"model.name: {config.name!r} is gated; accept the licence on the page of {name!r} and log in to "
            f"the hub, or set model.weights=FOLDER to a copy of yours"
        )
    return ConfigError(
        f"model.name: {config.name!r} cannot be loaded ({reason}); write model=hf/NAME, or model=hf/ and the "
        f"absolute path of a folder that save_pretrained wrote"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """While the block runs, the libraries log errors only: no new classifier, no tries of a network."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    from transformers.utils import logging as own

    shown = own.is_progress_bar_enabled()
    own.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if shown:
            own.enable_progress_bar()


def _size(config: ModelConfig, settings: Any, task: str) -> int:
    """Most tokens of a text."""
    most = getattr(settings, "max_position_embeddings", None)
    if most is not None and settings.model_type in SHIFTED:
        most -= settings.pad_token_id + 1
    if config.size is not None and most is not None and config.size > most:
        raise ConfigError(
            f"model.size: {config.size} is more than the {most} tokens that {config.name!r} takes"
        )
    usual = LENGTHS[task]
    return config.size or (usual if most is None else min(usual, most))


def _layers_of(trunk: nn.Module) -> tuple[str, list[nn.Module]]:
    """Name and content of the list of the layers of a network.

    Raises:
        ConfigError: It has none.
    """
    wanted = getattr(trunk.config, "num_hidden_layers", None)
    for name, module in trunk.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return name, list(module)
    raise ConfigError(
        f"model.name: a network of type {type(trunk).__name__} has no list of its {wanted} layers"
    )


def _use_linear_layers(trunk: nn.Module) -> bool:
    """Replace GPT-2's layers with transposed weights by ordinary ones; returns whether there were any."""
    from transformers.pytorch_utils import Conv1D

    found = False
    for name, module in list(trunk.named_modules()):
        if isinstance(module, Conv1D):
            found = True
            d_in, d_out = module.weight.shape
            weight = module.weight.detach().mT.contiguous()
            with torch.device("meta"):
                layer = nn.Linear(d_in, d_out)
            layer.weight = nn.Parameter(weight)
            layer.bias = nn.Parameter(module.bias.detach())
            parent, _, leaf = name.rpartition(".")
            setattr(trunk.get_submodule(parent), leaf, layer)
    return found


def _plan(whole: Any, is_decoder: bool) -> HeadPlan:
    """The layers of the library's own classifier."""
    settings = whole.config
    own: dict[str, Any] = {"std": float(getattr(settings, "initializer_range", 0.02))}
    if not isinstance(getattr(whole, "score" if is_decoder else "classifier", None), nn.Module):
        raise ConfigError(
            f"model.name: {type(whole).__name__} has no classifier of a known kind; choose another model"
        )
    if is_decoder:
        score = whole.score
        return HeadPlan(
            name="score", width=score.in_features, bias=score.bias is not None, **own, last="score"
        )
    head = whole.classifier
    if isinstance(head, nn.Linear):
        plan = HeadPlan(
            name="classifier",
            width=head.in_features,
            bias=head.bias is not None,
            dropout=_rate(getattr(whole, "dropout", None)),
            **own,
            last="classifier",
        )
        return _with_hidden(plan, whole)
    last = getattr(head, "out_proj", None) or getattr(head, "classifier", None)
    if not (isinstance(last, nn.Linear) and isinstance(getattr(head, "dense", None), nn.Linear)):
        raise ConfigError(
            f"model.name: the classifier of {type(whole).__name__} is of an unknown kind, "
            f"{type(head).__name__}; use it as a language model, or choose another model"
        )
    rate = _rate(getattr(head, "dropout", None))
    activation = "tanh" if "Roberta" in type(head).__name__ or settings.model_type in SHIFTED else "gelu"
    return HeadPlan(
        name="classifier",
        width=last.in_features,
        bias=last.bias is not None,
        activation=activation,
        before=rate,
        dropout=rate,
        **own,
        hidden="classifier.dense",
        last="classifier.out_proj",
    )


def _with_hidden(plan: HeadPlan, whole: Any) -> HeadPlan:
    """The plan with the hidden layers that DistilBERT and DeBERTa have outside of their classifier."""
    from dataclasses import replace

    if hasattr(whole, "pre_classifier"):
        return replace(plan, activation="relu", hidden="pre_classifier")
    pooler = getattr(whole, "pooler", None)
    if isinstance(getattr(pooler, "dense", None), nn.Linear):
        activation = getattr(whole.config, "pooler_hidden_act", "gelu")
        return replace(
            plan, activation=activation, before=_rate(getattr(pooler, "dropout", None)), hidden="pooler.dense"
        )
    return plan


def _rate(dropout: Any) -> float:
    return float(getattr(dropout, "p", getattr(dropout, "drop_prob", 0.0)) or 0.0)


def whole_model(
    model: Any, config: ModelConfig, values: Mapping[str, Tensor], labels: Mapping[str, str]
) -> Any:
    """A model of the library with the values of a trained backbone.

    Args:
        model: The backbone.
        config: The section `model` of its experiment.
        values: All values, by their names in the library.
        labels: Name of each class by its number, as text; empty: it classifies nothing.

    Raises:
        ConfigError: The library's model cannot hold these values.
    """
    from transformers.pytorch_utils import Conv1D

    learns = isinstance(model.net, TextNet) and model.net.pools == "all"
    kind = "AutoModelForCausalLM" if learns else "AutoModelForSequenceClassification"
    settings = settings_of(config)
    settings.use_cache = True
    if not learns:
        settings.num_labels = model.num_classes
    if labels:
        settings.id2label = {int(place): name for place, name in labels.items()}
        settings.label2id = {name: int(place) for place, name in labels.items()}
        settings.problem_type = "single_label_classification"
    whole = _random_model(kind, config, settings)
    turned = {f"{name}.weight" for name, module in whole.named_modules() if isinstance(module, Conv1D)}
    given = {name: value.mT.contiguous() if name in turned else value for name, value in values.items()}
    names = {name for name, _ in whole.named_parameters()}
    try:
        missing, unexpected = whole.load_state_dict(given, strict=False)
    except RuntimeError as err:
        missing, unexpected = [one_line(err)], []
    if wrong := sorted({*(set(missing) & names), *unexpected}):
        raise ConfigError(
            f"merged: {type(whole).__name__} cannot hold what was trained ({wrong[0][:200]}); run.params has "
            f"all trained tensors"
        )
    return whole


@dataclass(frozen=True, kw_only=True)
class LibraryNames:
    """The names that a model and its tensors have in the library, for an adapter that PEFT reads.

    Attributes:
        model: Folder or name of the model.
        blocks: Name of its list of layers.
        task: PEFT's name of the task, SEQ_CLS or CAUSAL_LM.
        transposed: Whether the weights of its linear layers are transposed.
        head: Name of each trained layer of the head, by the beginning of its global name.
    """

    model: str
    blocks: str
    task: str
    transposed: bool
    head: Mapping[str, str]

    def of(self, name: str) -> str:
        """The name of a tensor in the library's model, from its global name.

        >>> names = LibraryNames(
        ...     model="x",
        ...     blocks="bert.encoder.layer",
        ...     task="SEQ_CLS",
        ...     transposed=False,
        ...     head={"head": "classifier"},
        ... )
        >>> names.of("blocks.3.output.dense.lora_A"), names.of("head.bias")
        ('bert.encoder.layer.3.output.dense.lora_A', 'classifier.bias')
        """
        for ours, theirs in sorted(self.head.items(), reverse=True):
            if name.startswith(f"{ours}."):
                return f"{theirs}.{name.removeprefix(f'{ours}.')}"
        return f"{self.blocks}.{name.removeprefix('blocks.')}"

    @property
    def modules_to_save(self) -> list[str]:
        """Modules that PEFT is to replace by those that were trained."""
        return sorted({name.partition(".")[0] for name in self.head.values()})


def library_names(model: Any) -> LibraryNames | None:
    """The library's names of a backbone; None: it is not of transformers."""
    net = model.net
    if not isinstance(net, TextNet):
        return None
    head = {}
    if isinstance(model.head, TextHead):
        plan = model.head.plan
        head = {"head": plan.last, **({"head.dense": plan.hidden} if plan.hidden else {})}
    return LibraryNames(
        model=str(model.tokenizer),
        blocks=f"{net.prefix}.{net.path}",
        task="SEQ_CLS" if head else "CAUSAL_LM",
        transposed=net.transposed,
        head=head,
    )


SITES: Mapping[str, tuple[str, ...]] = {
    "query_value": (
        *(r"attention\.self\.(query|value)", r"attention\.self\.(query|value)_proj"),
        *(r"(self_)?attn\.[qv]_proj", r"(self_)?attn\.c_attn", r"attention\.[qv]_lin"),
        *(r"attention\.query_key_value", r"attn\.Wqkv", r"attn\.qkv"),
    ),
    "all_linear": (r".+",),
}
"""Layers of a block by what they are called where LoRA is described: queries and values, or all of them."""
