"""Finding weight files, in the caches or on the hub, and putting them into a network."""

from __future__ import annotations

import logging
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError

log = logging.getLogger(__name__)

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")
PROBE_SECONDS = 5.0
"""How long a host may take to answer before it counts as unreachable; the download itself has no limit."""

POSITION_TABLES = ("pos_embed", "relative_position")
"""Tensors that timm can resize to another input size."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Where published weights are.

    Attributes:
        files: File names, the preferred one first.
        repository: Repository on the model hub that holds one of them; empty: they are at `url`.
        url: Address of the file outside the hub.
    """

    files: tuple[str, ...]
    repository: str = ""
    url: str = ""

    @property
    def description(self) -> str:
        return (
            f"{self.files[0]!r} of the hub's {self.repository!r}" if self.repository else repr(self.files[0])
        )


def locate(label: str, source: Published) -> Path:
    """The weight file in the local cache, downloaded first if need be.

    Libraries retry for most of a minute before they admit that there is no network, even for a cached file.
    So the cache is looked at first, and a short probe decides whether a download is worth trying.

    Raises:
        ConfigError: It is not cached and cannot be had; names the model, the file and the key to set.
    """
    found = _cached(source)
    if found is not None:
        return found
    try:
        return _from_hub(source) if source.repository else _from_url(source)
    except Exception as err:  # whatever the network layers raise: there are three of them
        reason = " ".join(f"{type(err).__name__}: {err}".split())
        raise ConfigError(
            f"model.pretrained=true: the weights of {label!r} are not in the local cache and cannot be "
            f"downloaded ({reason[:120]}); they are the file {source.description}. Put it anywhere and "
            f"set model.pretrained=PATH, or set model.pretrained=false for random weights"
        ) from err


def read(path: Path) -> dict[str, Tensor]:
    """State dict of a file that may come from a stranger; pickles may hold tensors only.

    Raises:
        ConfigError: No such file, another format, not a state dict, or a tensor that is not plain.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        raise ConfigError(f"model.pretrained: {str(path)!r} is not a file; give a state dict, true or false")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"model.pretrained: {str(path)!r} must end with one of {', '.join(SUFFIXES)}")
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except MemoryError:
        raise
    except Exception as err:  # parsers of a stranger's bytes raise almost anything
        reason = f"{type(err).__name__}: {err}".split("\n")[0]
        raise ConfigError(f"model.pretrained: {str(path)!r} is not a readable state dict: {reason}") from err
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f"model.pretrained: {str(path)!r} is not a state dict: it must map names to tensors"
        )
    for name, value in state.items():
        if odd := _oddity(value):
            raise ConfigError(f"model.pretrained: {str(path)!r}: tensor {name!r} {odd}")
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def _oddity(value: Tensor) -> str:
    """Why a tensor is not what weights are; empty for one that is. Reads its values last."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return "is sparse, quantized or without values; save it as a plain tensor"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"claims shape {tuple(value.shape)} but the file does not hold that many values"
    if value.is_floating_point() and not torch.isfinite(value).all():
        return "holds NaN or infinity"
    return ""


def load_into(net: nn.Module, path: Path, classifiers: Sequence[str]) -> None:
    """Put a file's tensors into a network without classifier, in float32.

    The file's classifier is ignored. Position tables of another input size are resized by timm, which can
    also read the formats of a model's first authors.

    Args:
        net: The network, its classifier removed.
        path: The file.
        classifiers: What the model calls its classifier, e.g. `head`, `fc`, `classifier.6`.

    Raises:
        ConfigError: The file cannot be read, or its tensors are not this network's.
    """
    state = _without(read(path), classifiers)
    problem = _mismatch(net, state)
    if problem and _only_tables_differ(net, state):
        state, problem = _converted(net, state, classifiers, problem)
    if problem:
        raise ConfigError(f"model.pretrained: {str(path)!r} does not fit the model: {problem}")
    net.load_state_dict(
        state, strict=False
    )  # lenient about the batch counters that `_mismatch` allows to miss


def _cached(source: Published) -> Path | None:
    if not source.repository:
        path = Path(torch.hub.get_dir()) / "checkpoints" / source.files[0]
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    repository, revision = _split(source.repository)
    for name in source.files:
        found = try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(found, str):
            return Path(found)
    return None


def _from_hub(source: Published) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    repository, revision = _split(source.repository)
    for name in source.files:
        try:
            get_hf_file_metadata(hf_hub_url(repository, name, revision=revision), timeout=PROBE_SECONDS)
        except EntryNotFoundError:
            continue
        log.info("downloading %s of %s", name, repository)
        return Path(hf_hub_download(repository, name, revision=revision))
    raise FileNotFoundError(f"{repository} holds none of {', '.join(source.files)}")


def _from_url(source: Published) -> Path:
    request = urllib.request.Request(source.url, method="HEAD")
    with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
        pass
    path = Path(torch.hub.get_dir()) / "checkpoints" / source.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    log.info("downloading %s", source.files[0])
    torch.hub.download_url_to_file(source.url, str(path), progress=False)
    return path


def _split(repository: str) -> tuple[str, str | None]:
    name, _, revision = repository.partition("@")
    return name, revision or None


def _without(state: Mapping[str, Tensor], classifiers: Sequence[str]) -> dict[str, Tensor]:
    heads = tuple(f"{name}." for name in classifiers)
    return {name: value for name, value in state.items() if not name.startswith(heads)}


def _mismatch(net: nn.Module, state: Mapping[str, Tensor]) -> str:
    """The first thing that is wrong, and how many there are; empty when all fits."""
    mine = net.state_dict()
    missing = sorted(n for n in mine.keys() - state.keys() if not n.endswith("num_batches_tracked"))
    both = sorted(mine.keys() & state.keys())
    wrong = [n for n in both if mine[n].shape != state[n].shape]
    kinds = [n for n in both if mine[n].is_floating_point() != state[n].is_floating_point()]
    extra = sorted(state.keys() - mine.keys())
    count = f"({len(missing)} tensors missing, {len(wrong)} of another shape, {len(extra)} unexpected)"
    if wrong:
        have, want = tuple(state[wrong[0]].shape), tuple(mine[wrong[0]].shape)
        return f"{wrong[0]!r} has shape {have}, the model's has {want} {count}"
    if kinds:
        return f"{kinds[0]!r} is {state[kinds[0]].dtype}, the model's is {mine[kinds[0]].dtype}"
    if missing or extra:
        name, what = (missing[0], "is missing") if missing else (extra[0], "is unexpected")
        return f"{name!r} {what} {count}"
    return ""


def _only_tables_differ(net: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether timm's conversion is safe: it would also resize a patch embedding without being asked."""
    mine = net.state_dict()
    return all(
        mine[name].shape == state[name].shape or any(table in name for table in POSITION_TABLES)
        for name in mine.keys() & state.keys()
    )


def _converted(
    net: nn.Module, state: dict[str, Tensor], classifiers: Sequence[str], problem: str
) -> tuple[dict[str, Tensor], str]:
    """The state as timm converts it for this family, and what is still wrong then."""
    convert = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state, problem
    try:
        converted = _without(convert(dict(state), net), classifiers)
    except (KeyError, AttributeError, RuntimeError, ValueError, AssertionError):
        return state, problem  # a file the conversion was not made for; the first problem says more
    return (state, problem) if (still := _mismatch(net, converted)) else (converted, still)
