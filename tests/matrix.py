"""Small experiments for every method, tuning and kind of model, and which of these fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayfed.config.schema import load_config
from rayfed.testing import SGD

TINY = (
    "rounds=2",
    "evaluation.every=2",
    "evaluation.personal=true",
    "model.options={depth: 2}",
    "model.pretrained=false",
    "train.batch_size=2",
    "data.partition.scheme=by_domain",
    "data.domains=[plain,fonts]",
    "data.limit=6",
    "data.val=2",
    "tensorboard=false",
    *SGD,
)
"""Two rounds of two clients with a few images each and a model of two blocks."""

KINDS = {
    "vit": (),
    "mixer": ("model=mixer_mini", "model.options={num_blocks: 2}"),
    "resnet": ("model=test_resnet", "model.options={}", "model.size=64"),
    "clip": ("model=clip_mini",),
    "u-net": (
        *("data=prostate_mini", "data.domains=[RUNMC,UCL]", "data.limit=3", "data.val=0", "data.test=1"),
        *("model=unet", "model.options={width: 2}", "model.size=32"),
    ),
    "lstm": (
        *("data=shakespeare", "data.domains=null", "data.limit=6", "data.val=0.2"),
        *("model=char_lstm", "model.options={hidden: 8}", "model.size=16"),
    ),
}
"""The kinds of models; `KINDS["lstm"]` reads a text of the folder `data.root`."""

TUNINGS_OF = {
    "vit": (
        *("adapter", "attention_adapter", "bitfit", "exits", "full", "gc_prompt", "head", "ia3", "lora"),
        *("peft", "residual_adapter", "ssf", "visual_prompt"),
    ),
    "mixer": (
        *("adapter", "attention_adapter", "bitfit", "exits", "full", "head", "ia3", "lora"),
        *("peft", "residual_adapter", "ssf"),
    ),
    "resnet": ("attention_adapter", "bitfit", "full", "head", "residual_adapter", "ssf"),
    "clip": (
        *("adapter", "attention_adapter", "bitfit", "cocoop", "full", "head", "ia3", "lora"),
        *("low_rank_prompt", "maple", "multimodal_adapter", "peft", "prompt_network", "residual_adapter"),
        *("ssf", "text_prompt", "transport_prompt"),
    ),
    "u-net": ("full",),
    "lstm": ("full",),
}
"""The tunings that each kind takes; the others are refused."""

SPEECH = "To be, or not to be: that is the question: whether 'tis nobler in the mind to suffer slings. "


def fitting() -> Iterator[tuple[str, str]]:
    """Every kind of model with every tuning that it takes."""
    for kind, names in TUNINGS_OF.items():
        for name in names:
            yield kind, name


def of_kind(kind: str, tuning: str, folder: Path) -> list[str]:
    """Overrides of a small experiment with a kind of model and a tuning; a text is written to the folder."""
    algorithm = "depthfl" if tuning == "exits" else "fedavg"
    overrides = [*TINY, f"algorithm={algorithm}", f"tuning={tuning}", *KINDS[kind]]
    if kind == "lstm":
        roles = "\n\n".join(f"{role}:\n{SPEECH}" for _ in range(3) for role in ("HAMLET", "ROMEO"))
        (folder / "input.txt").write_text(roles + "\n")
        overrides.append(f"data.root={folder}")
    return overrides


def with_dropout(overrides: list[str], share: float) -> list[str]:
    """The overrides with this share of dropout, where the tuning has any."""
    tuning = load_config(overrides).tuning
    if "inner" in tuning:
        return [*overrides, f"tuning.inner={{name: lora, dropout: {share}}}"]
    return [*overrides, f"tuning.dropout={share}"] if "dropout" in tuning else overrides
