"""Texts of a batch one after the other in one row, so that a network computes nothing for pads.

What a model gets and returns stays as it is: tokens (B, L), with `PAD` behind the texts, and features by text
or by token. Within the network the texts lie in one row of T tokens: positions begin anew at each text,
attention sees its own text only, and features are those of each text. All other layers compute each token
alone. So the row follows from the batch alone, and where a client runs changes no bit. It differs from a
padded batch by rounding, and in training by what dropout draws, because no numbers are drawn for pads.

Attention is computed for a few texts at once (`Layout`), with a mask that lets each see itself only. It took
less time than one mask for the whole row, than each text alone, and than padding texts of similar lengths
(benchmarks/results/packed_texts.md). Before a run `why_padded` tries with its own texts whether a network
gives the same in both ways.

Letters in shapes: B texts, L tokens of the longest one (rounded up), T of all texts, H heads of width d.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.data.text import PAD, Inputs
from rayfed.errors import one_line
from rayfed.fast.stacked import in_one_row, rows_of_clients
from rayfed.federation.local import Local
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import Backbone
from rayfed.models.language import SHIFTED, TextNet
from rayfed.objective import LANGUAGE_MODELING, Objective, OwnObjective

NAME = "rayfed_packed"
"""Name of `attend` among the functions that compute attention in the library."""

MOST = 96
"""Tokens of the texts whose attention is computed at once; a longer text is computed alone."""

KNOWN = frozenset(("dropout", "scaling", "is_causal"))
"""Options of attention in the library that are handed on."""

HARMLESS = frozenset(("position_ids", "cache_position", "use_cache", "output_attentions"))
"""Options that change nothing that is computed here."""


class UnpackableError(Exception):
    """A network does something in its attention that is not known here."""


class SpreadRows(torch.autograd.Function):
    """Rows (T, ...) at their places in a tensor (n, ...) of zeros; `Collect` takes them out again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, places, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return Collect.apply(grad, places), None, None


class Collect(torch.autograd.Function):
    """The rows (T, ...) at different places of a tensor (n, ...).

    Gradients are put back to where rows came from: sums over places, as those of indexing, are not needed.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = len(values)
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return SpreadRows.apply(grad, places, ctx.size), None


class Layout:
    """Where the tokens of a batch lie in a row, and which of them attention sees at once.

    Attributes:
        rows: Number B of texts.
        length: Number L of tokens of a padded text.
        places: Places of the T tokens in the padded batch, flat, int64, shape (T,).
        starts, ends: Places in the row of the first and the last token of each text, int64, shape (B,).
        parts: Tokens of the texts whose attention is computed at once, of each part of the row.
        features: The padded features of language models; None: there are none yet.
        passes: Number of times that attention was computed.
        window: Most tokens before it that a token of any layer sees.
    """

    def __init__(self, there: Tensor, repeated: Tensor | None = None) -> None:
        """Lay out a batch.

        Args:
            there: Where there are tokens, bool, shape (B, L); each text has some.
            repeated: Which text each row of the whole batch is; None: the texts are the batch.
        """
        self._repeated = repeated
        self._device = there.device
        self.rows, self.length = there.shape
        self.places = there.flatten().nonzero().squeeze(1)
        lengths = there.sum(1).cpu().numpy()
        ends = lengths.cumsum()
        self.starts = torch.from_numpy(ends - lengths).to(there.device)
        self.ends = torch.from_numpy(ends - 1).to(there.device)
        self._sums = np.concatenate([np.zeros(1, np.int64), ends])
        self._texts = divided(lengths.tolist())
        self.parts = [sum(texts) for texts in self._texts]
        self._masks: dict[bool, list[Tensor | None]] = {}
        self.features: weakref.ref[Tensor] | None = None
        self.passes = 0
        self.window = sys.maxsize

    def masks(self, causal: bool) -> list[Tensor | None]:
        """The tokens (columns) that a token (rows) of each part sees, (1, 1, n, n); None: it is one text.

        Args:
            causal: A token sees none behind itself.
        """
        if causal not in self._masks:
            self._masks[causal] = [_mask(texts, causal, self._device) for texts in self._texts]
        return self._masks[causal]

    def tokens_of(self, sizes: Sequence[int]) -> list[int]:
        """Number of tokens of each client. Args: sizes: texts of each client; empty: all are of one."""
        return np.diff(self._sums[np.cumsum([0, *sizes])]).tolist()

    def repeat(self, features: Tensor) -> Tensor:
        """Features of all rows of the batch, from those of the texts in the row."""
        return features if self._repeated is None else features.index_select(0, self._repeated)

    def padded(self, rows: Tensor) -> Tensor:
        """Values of tokens as those of a batch, shape (B, L, ...), from (T, ...); 0 for pads."""
        spread: Tensor = SpreadRows.apply(rows, self.places, self.rows * self.length)
        return spread.view(self.rows, self.length, *rows.shape[1:])

    def tokens_in(self, values: Tensor) -> Tensor | None:
        """The tokens that `padded` was given, (T, ...); None: these are no features of this batch."""
        if self._repeated is not None or self.features is None or self.features() is not values:
            return None
        rows: Tensor = Collect.apply(values.flatten(0, 1), self.places)
        return rows


def divided(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of tokens of texts by part of the row, which has at most `MOST` tokens or one text.

    >>> divided([40, 50, 7, 300, 2])
    [[40, 50], [7], [300], [2]]
    """
    parts: list[list[int]] = [[]]
    for length in lengths:
        if parts[-1] and sum(parts[-1]) + length > MOST:
            parts.append([])
        parts[-1].append(length)
    return parts


def _mask(texts: Sequence[int], causal: bool, device: torch.device) -> Tensor | None:
    """The mask of a part whose texts have these numbers of tokens."""
    if len(texts) == 1:
        return None
    owner = np.repeat(np.arange(len(texts)), texts)
    seen = owner[:, None] == owner
    return torch.from_numpy(np.tril(seen) if causal else seen).to(device)[None, None]


_LAYOUT: ContextVar[Layout] = ContextVar("layout")


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of each text to itself, part by part, as a function of the library for it.

    Args:
        module: The layer, which knows whether it is causal and how many heads share keys and values.
        query: Shape (1, H, T, d).
        key: Shape (1, H, T, d), or with fewer heads where several share one.
        value: As the keys.
        attention_mask: None.
        **options: Dropout, the factor of scores, and what else the library hands over.

    Returns:
        The sums of values, shape (1, T, H, d), and None in place of the weights.

    Raises:
        UnpackableError: An option is not known.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layout = _LAYOUT.get()
    layout.passes += 1
    if (window := options.pop("sliding_window", None)) is not None:
        layout.window = min(layout.window, window)
    for name, option in options.items():
        if name not in HARMLESS | KNOWN and option is not None and option is not False:
            raise UnpackableError(f"its attention takes {name}")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    known = {name: options[name] for name in KNOWN if name in options}
    one_by_one = ALL_ATTENTION_FUNCTIONS["sdpa"]
    parts = zip(*(x.split(layout.parts, 2) for x in (query, key, value)), layout.masks(causal), strict=True)
    found = [one_by_one(module, *part, **known)[0] for part in parts]
    return (found[0] if len(found) == 1 else torch.cat(found, 1)), None


class PackedTextNet(TextNet):
    """A network of texts that computes each batch in one row; a batch with an empty text is padded."""

    _layout: Layout | None = None

    def forward(self, x: Tensor) -> Tensor:
        """As of `TextNet`; features of pads are 0."""
        self._layout = None
        if x.is_meta or not len(x) or not bool((x[:, 0] != PAD).all()):
            return super().forward(x)
        sizes = rows_of_clients()
        own, repeated = _own_rows(sizes, len(x))
        x = x if own is None else x[own]
        self._layout = layout = Layout(x != PAD, repeated)
        given = self.named(x)
        given["position_ids"] = self._positions(given["input_ids"])
        row = {name: each.flatten()[layout.places][None] for name, each in given.items()}
        with self._packed(layout), in_one_row(layout.tokens_of(sizes)):
            hidden = self.trunk(**row).last_hidden_state
        return self.pooled(hidden)

    def pooled(self, hidden: Tensor) -> Tensor:
        """As of `TextNet`, from the states of all tokens of the last batch, shape (1, T, D)."""
        layout = self._layout
        if layout is None:
            return super().pooled(hidden)
        if self.pools == "all":
            features = layout.repeat(layout.padded(hidden[0]))
            layout.features = weakref.ref(features)
            return features
        picked = layout.repeat(
            Collect.apply(hidden[0], layout.ends if self.pools == "last" else layout.starts)
        )
        if self.pools == "pooler":
            picked = self.trunk.pooler(picked[:, None])
        return picked

    def _positions(self, ids: Tensor) -> Tensor:
        """Position numbers of tokens, shape (B, L), anew from the first at each text, as in the library."""
        if self.trunk.config.model_type in SHIFTED:
            counts = ids != self.pad
            return counts.cumsum(1) * counts + self.pad
        return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    @contextmanager
    def _packed(self, layout: Layout) -> Iterator[None]:
        """Within it the library computes attention in parts of a row, and no pooled token."""
        modules, settings = self.trunk._modules, self.trunk.config
        pooler, before = modules.get("pooler"), settings._attn_implementation
        token = _LAYOUT.set(layout)
        settings._attn_implementation = NAME
        if pooler is not None:
            modules["pooler"] = None
        try:
            yield
        finally:
            settings._attn_implementation = before
            if pooler is not None:
                modules["pooler"] = pooler
            _LAYOUT.reset(token)


class PackedHead(nn.Linear):
    """The head of a language model, which computes no logits for pads; they are 0."""

    _net: PackedTextNet

    def forward(self, input: Tensor) -> Tensor:
        """Logits, shape (B, L, V), of features of tokens, shape (B, L, D)."""
        layout = self._net._layout
        rows = None
        if layout is not None and isinstance(self.weight, Tensor):
            rows = layout.tokens_in(input)
        if layout is None or rows is None:
            return super().forward(input)
        return layout.padded(super().forward(rows))


def _own_rows(sizes: Sequence[int], rows: int) -> tuple[Tensor | None, Tensor | None]:
    """Numbers of the rows of a joint batch that are no repetitions, and for each row which of them it is.

    Both are None where there are no repetitions. A client has room for as many rows as the largest one, and
    its first row is repeated in the rest (`rayfed.fast.group.Rows`).

    Args:
        sizes: Rows of each client; empty: all are of one.
        rows: Number of all rows.

    >>> _own_rows([2, 1], 4)
    (tensor([0, 1, 2]), tensor([0, 1, 2, 2]))
    """
    if sum(sizes) in (0, rows):
        return None, None
    room = rows // len(sizes)
    own = [k * room + i for k, size in enumerate(sizes) for i in range(size)]
    ends = np.cumsum(sizes)
    first = zip(ends - sizes, sizes, strict=True)
    repeated = [start + (i if i < size else 0) for start, size in first for i in range(room)]
    return torch.tensor(own), torch.tensor(repeated)


def use_packed_texts(model: Backbone) -> None:
    """Let the network of a model compute the texts of a batch in one row.

    Args:
        model: A model for which `why_padded` has found no reason.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    net: Any = model.net
    net.__class__ = PackedTextNet
    if net.pools == "all" and type(model.head) is nn.Linear:
        vars(model.head)["_net"] = net  # no part of the head
        model.head.__class__ = PackedHead


def why_method_padded(local: Local, objective: Objective) -> str:
    """Why a method may read what a network computes for pads, which is 0 without them; empty: it does not."""
    if objective.reads != LANGUAGE_MODELING:
        return ""
    if isinstance(objective, OwnObjective):
        return "a loss of your own gets outputs for pads, too"
    ships = type(local).__module__.partition(".")[0] in ("algorithms", "rayfed")
    return "" if ships else "a method of your own gets outputs for pads, too"


LENGTHS = (1, 3, 17, 40, 64)
"""Tokens of the texts with which a network is tried: texts of the run that are cut there."""

TOLERANCE = 1e-4
"""Largest difference of features, as a share of the largest one; both ways differ by rounding only."""

CHANGE = 0.1
"""Size of the random numbers that are added to trained tensors for the second try."""


def why_padded(model: Backbone, inputs: Inputs, train: TrainConfig) -> str:
    """Why the texts of a batch cannot lie in one row; empty: they can.

    Args:
        model: The tuned model with its values, in evaluation mode.
        inputs: The texts of the run.
        train: Config of local optimization.
    """
    for key in ("checkpointing", "compile"):
        if getattr(train, key):
            return f"train.{key} runs the network in another way"
    net = model.net
    if type(net) is not TextNet:
        return "the network is one of your own"
    if any(hasattr(module, "own_weight") for module in net.modules()):
        return "adapters weigh each text of a batch (tuning.personal)"
    if reason := _why_unknown(net):
        return reason
    x = _some(inputs)
    if x is None:
        return "there are no texts to try it with"
    generator = torch.Generator().manual_seed(0)
    start = {name: entry.tensor.detach() for name, entry in model.tensors().items() if entry.is_trained}
    moved = {name: _near(value, generator) for name, value in start.items()}
    for values in (start, moved):
        if reason := _why_different(model, values, x):
            return reason
    return ""


def _why_unknown(net: TextNet) -> str:
    """Why a network cannot be tried at all; empty: it can."""
    settings = net.trunk.config
    if settings._attn_implementation != "sdpa":
        return "its attention is not that of torch"
    if "position_ids" not in inspect.signature(net.trunk.forward).parameters:
        return f"networks of type {settings.model_type!r} take no position numbers"
    return ""


def _some(inputs: Inputs) -> Tensor | None:
    """Texts cut to different lengths as a padded batch, int64, shape (B, L); None: there are none."""
    longest = inputs.lengths.argsort(kind="stable")[::-1][: len(LENGTHS)]
    cut = [
        inputs.tokens[inputs.starts[row] : inputs.starts[row + 1]][:length]
        for row, length in zip(longest, LENGTHS, strict=False)
    ]
    cut = [tokens for tokens in cut if len(tokens)]
    if not cut:
        return None
    batch = np.full((len(cut), max(map(len, cut)) + 1), PAD)
    for row, tokens in zip(batch, cut, strict=True):
        row[: len(tokens)] = tokens
    return torch.from_numpy(batch)


def _near(value: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor with random numbers added, where it has fractions."""
    if not value.is_floating_point():
        return value
    noise = torch.randn(value.shape, generator=generator).to(value)
    return value + CHANGE * noise


@torch.no_grad()
def _why_different(model: Backbone, values: Mapping[str, Tensor], x: Tensor) -> str:
    """Why a network gives other features without pads; empty: they are the same but for rounding."""
    net: Any = model.net
    head: Any = model.head
    expected = model.output_with(values, x.clone(), headless=True)
    use_packed_texts(model)
    try:
        found = model.output_with(values, x.clone(), headless=True)
        passes, window = net._layout.passes, net._layout.window
    except Exception as err:  # networks of the library raise almost anything
        return f"the network fails without pads ({type(err).__name__}: {one_line(err)[:200]})"
    finally:
        net.__class__ = TextNet
        vars(net).pop("_layout", None)
        if vars(head).pop("_net", None) is not None:
            head.__class__ = nn.Linear
        model.forget()
    if passes != (len(model.active) or len(net.blocks)):
        return "its attention is computed by code of its own"
    if window < model.size:
        return f"its tokens see {window} others, and texts have up to {model.size} (model.size)"
    if net.pools == "all":
        expected, found = expected[x != PAD], found[x != PAD]
    differs, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if differs <= TOLERANCE * largest:
        return ""
    return f"features without pads differ by {differs:.2g}, of up to {largest:.2g}"
