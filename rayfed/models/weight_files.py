"""Find weight files in the local caches or on the model hub, and load them into a network."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rayfed.errors import ConfigError
from rayfed.models.model_config import SUFFIXES

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Seconds after which a host that has not answered counts as unreachable; a download has no limit."""

SHA256 = re.compile(r"[0-9a-f]{64}")
DIGEST_IN_NAME = re.compile(r"-([0-9a-f]{8,64})\.[a-z]+$")
"""The first digits of a file's SHA-256 at the end of its name, as in torch's and timm's addresses."""

POSITION_TABLES = ("pos_embed", "relative_position")
"""Parts of the names of tensors that timm can resize to another input size."""


@dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """Location of published weights.

    Attributes:
        files: File names, the preferred one first.
        repository: Repository of the model hub that holds one of the files; empty: the file is at `url`.
        url: Address of a file outside the hub.
    """

    files: tuple[str, ...]
    repository: str = ""
    url: str = ""

    @property
    def description(self) -> str:
        return (
            f"{self.files[0]!r} of the hub's {self.repository!r}" if self.repository else repr(self.files[0])
        )


def locate(label: str, source: PublishedWeights) -> Path:
    """The weight file in the local cache; it is downloaded first if it is not there.

    The download libraries retry for most of a minute without a network, even for a cached file. So the cache
    is searched first, and a download begins only after the host answered a short request.

    Args:
        label: Name of the model, for messages.
        source: Location of the weights.

    Raises:
        ConfigError: The file is not cached and cannot be downloaded; names the model, the file and the key.
    """
    cached = _find_cached(source)
    if cached is not None:
        return cached
    try:
        return _from_hub(source) if source.repository else _from_url(source)
    except Exception as err:  # three network libraries with their own exceptions
        reason = " ".join(f"{type(err).__name__}: {err}".split())
        raise ConfigError(
            f"model.pretrained=true: the weights of {label!r} are not in the local cache and cannot be "
            f"downloaded ({reason[:200]}); they are the file {source.description}. Put it anywhere and "
            f"set model.weights=FILE, or set model.pretrained=false for random weights"
        ) from err


def read_state_dict(path: Path, key: str = "model.weights") -> dict[str, Tensor]:
    """Read the state dict of an untrusted file; a pickle may contain tensors only.

    Args:
        key: Config key that names it, for errors.

    Returns:
        Tensors by name; floating point tensors are converted to float32.

    Raises:
        ConfigError: There is no such file, it has another format, is not a state dict, or has a tensor that
            is sparse, quantized, incomplete or not finite.
    """
    from timm.models import load_state_dict

    if not path.is_file():
        short = "; model.pretrained=PATH is short for model.weights=PATH" if key == "model.weights" else ""
        raise ConfigError(f"{key}: {str(path)!r} is not a file; give a state dict{short}")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{key}: {str(path)!r} must end with one of {', '.join(SUFFIXES)}")
    try:
        state = load_state_dict(str(path), use_ema=False, weights_only=True)
    except MemoryError:
        raise
    except Exception as err:  # parsers raise almost any exception on malformed bytes
        reason = f"{type(err).__name__}: {err}".split("\n")[0]
        raise ConfigError(f"{key}: {str(path)!r} is not a readable state dict: {reason}") from err
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{key}: {str(path)!r} is not a state dict: it must map names to tensors")
    for name, value in state.items():
        if problem := _tensor_problem(value):
            raise ConfigError(f"{key}: {str(path)!r}: tensor {name!r} {problem}")
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def _tensor_problem(value: Tensor) -> str:
    """Why a tensor cannot be a weight, or an empty string. Checks the values after the storage is checked."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return "is sparse, quantized or without values; save it as a plain tensor"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return f"claims shape {tuple(value.shape)} but the file does not hold that many values"
    if value.is_floating_point() and not torch.isfinite(value).all():
        return "holds NaN or infinity"
    return ""


def load_into(net: nn.Module, path: Path, classifiers: Sequence[str], key: str = "model.weights") -> None:
    """Load a file's tensors into a network without classifier, in float32.

    The classifier in the file is ignored. If the input size differs, timm resizes the position tables; timm
    also converts files in the format of a model's authors.

    Args:
        net: The network, its classifier removed.
        classifiers: Names of the classifier's modules in the file, e.g. `head`, `fc`, `classifier.6`.
        key: Config key that names the file, for errors.

    Raises:
        ConfigError: The file cannot be read, or its tensors do not fit the network.
    """
    state = _without(read_state_dict(path, key), classifiers)
    problem = _mismatch(net, state)
    if problem and _only_tables_differ(net, state):
        state, problem = _convert(net, state, classifiers, problem)
    if problem:
        raise ConfigError(f"{key}: {str(path)!r} does not fit the model: {problem}")
    # Not strict, because `_mismatch` allows that BatchNorm's batch counters are missing.
    net.load_state_dict(state, strict=False)


def _find_cached(source: PublishedWeights) -> Path | None:
    if not source.repository:
        path = Path(torch.hub.get_dir()) / "checkpoints" / source.files[0]
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    repository, revision = _split(source.repository)
    for name in source.files:
        cached = try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
    return None


def _from_hub(source: PublishedWeights) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    repository, revision = _split(source.repository)
    for name in source.files:
        try:
            known = get_hf_file_metadata(
                hf_hub_url(repository, name, revision=revision), timeout=PROBE_SECONDS
            )
        except EntryNotFoundError:
            continue
        log.info("downloading %s of %s", name, repository)
        path = Path(hf_hub_download(repository, name, revision=revision))
        if known.etag and SHA256.fullmatch(known.etag):  # large files are named by their digest
            _check_digest(path, known.etag)
        return path
    raise FileNotFoundError(f"{repository} holds none of {', '.join(source.files)}")


def _from_url(source: PublishedWeights) -> Path:
    request = urllib.request.Request(source.url, method="HEAD")
    with urllib.request.urlopen(request, timeout=PROBE_SECONDS) as answer:
        size = answer.headers.get("Content-Length")
    path = Path(torch.hub.get_dir()) / "checkpoints" / source.files[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    log.info("downloading %s", source.files[0])
    torch.hub.download_url_to_file(source.url, str(path), progress=False)
    got = path.stat().st_size
    if size is not None and got != int(size):  # a lost connection looks like the end to urllib
        path.unlink()
        raise OSError(f"the download ended after {got} of {size} bytes")
    if digest := DIGEST_IN_NAME.search(source.url):
        _check_digest(path, digest.group(1))
    return path


def _check_digest(path: Path, start: str) -> None:
    """Remove a downloaded file and raise OSError unless its SHA-256 digest begins with `start`."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if not digest.startswith(start):
        path.resolve().unlink()  # a file of the hub is a link into its cache
        path.unlink(missing_ok=True)
        raise OSError(f"the file is damaged: its SHA-256 begins with {digest[:12]} instead of {start[:12]}")


def _split(repository: str) -> tuple[str, str | None]:
    name, _, revision = repository.partition("@")
    return name, revision or None


def _without(state: Mapping[str, Tensor], classifiers: Sequence[str]) -> dict[str, Tensor]:
    heads = tuple(f"{name}." for name in classifiers)
    return {name: value for name, value in state.items() if not name.startswith(heads)}


def _mismatch(net: nn.Module, state: Mapping[str, Tensor]) -> str:
    """The first tensor that does not fit and counts of such tensors; empty if the state dict fits."""
    mine = net.state_dict()
    missing = sorted(n for n in mine.keys() - state.keys() if not n.endswith("num_batches_tracked"))
    both = sorted(mine.keys() & state.keys())
    wrong = [n for n in both if mine[n].shape != state[n].shape]
    kinds = [n for n in both if mine[n].is_floating_point() != state[n].is_floating_point()]
    extra = sorted(state.keys() - mine.keys())
    count = f"({len(missing)} tensors missing, {len(wrong)} of another shape, {len(extra)} unexpected)"
    if wrong:
        shapes = f"has shape {tuple(state[wrong[0]].shape)}, the model's has {tuple(mine[wrong[0]].shape)}"
        return f"{wrong[0]!r} {shapes} {count}"
    if kinds:
        return f"{kinds[0]!r} is {state[kinds[0]].dtype}, the model's is {mine[kinds[0]].dtype}"
    if missing:
        return f"{missing[0]!r} is missing {count}"
    return f"{extra[0]!r} is unexpected {count}" if extra else ""


def _only_tables_differ(net: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Whether all tensors of another shape are position tables.

    Only then is timm's conversion used: it would resize a patch embedding of another size without an error.
    """
    mine = net.state_dict()
    return all(
        mine[name].shape == state[name].shape or any(table in name for table in POSITION_TABLES)
        for name in mine.keys() & state.keys()
    )


def _convert(
    net: nn.Module, state: dict[str, Tensor], classifiers: Sequence[str], problem: str
) -> tuple[dict[str, Tensor], str]:
    """Convert a state dict with timm's function for this family of models.

    Returns:
        The converted state dict and an empty string, or the unconverted one and the problem that remains.
    """
    convert = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return state, problem
    try:
        converted = _without(convert(dict(state), net), classifiers)
    except (KeyError, AttributeError, RuntimeError, ValueError, AssertionError):
        return state, problem  # timm cannot convert this file; the first problem tells the user more
    remaining = _mismatch(net, converted)
    return (state, problem) if remaining else (converted, "")
