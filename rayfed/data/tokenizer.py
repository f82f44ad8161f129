"""Loads the tokenizer of a model from a folder, or from the hub or its cache if that does not answer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayfed.errors import ConfigError, one_line

TYPES = "token_type_ids"
"""The library's name of the types of tokens."""

ANSWER_SECONDS = 5.0
"""Seconds in which the hub must begin to answer."""


@contextmanager
def answered_or_cached(name: str = "") -> Iterator[bool]:
    """Whether the hub answers. If it does not, the library uses its cache while the block runs.

    Any answer counts, also one that says that the server is busy: then the library tries again, as it does by
    default. Without a network these tries would take half a minute.

    Args:
        name: What is loaded; the absolute path of a folder needs no hub.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before and not Path(name).is_absolute():
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
        except Exception:  # the kinds of errors differ between versions of the library
            constants.HF_HUB_OFFLINE = True
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model of transformers, from a folder or from the hub or its cache.

    Args:
        name: A folder, or the name of the model on the hub.

    Raises:
        ConfigError: It cannot be loaded, or is not one of the fast ones.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    from transformers import AutoTokenizer

    try:
        with answered_or_cached(name):
            found = AutoTokenizer.from_pretrained(name, trust_remote_code=False, use_fast=True)
    except Exception as err:  # the library raises almost anything
        raise ConfigError(
            f"model.name: the tokenizer of {name!r} cannot be loaded ({one_line(err)[:200]}); it lies in the "
            f"folder of the model, as tokenizer.json"
        ) from err
    if not getattr(found, "is_fast", False):
        raise ConfigError(f"model.name: {name!r} has no tokenizer.json, which holds a fast tokenizer")
    found.backend_tokenizer.no_truncation()
    found.backend_tokenizer.no_padding()
    return found


def digest_of(tokenizer: Any) -> str:
    """A hash of everything that decides which tokens a text becomes."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    for set_by_each_call in ("truncation", "padding"):
        rules.pop(set_by_each_call, None)
    parts = [
        json.dumps(rules),
        json.dumps({key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}),
        str(tokenizer.chat_template),
        json.dumps(list(tokenizer.model_input_names)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
