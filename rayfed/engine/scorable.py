"""Checks that a model trained on some classes can score others (`evaluation.model_of`)."""

from __future__ import annotations

from dataclasses import replace

from rayfed.config.schema import Config
from rayfed.errors import ConfigError
from rayfed.executors.worker import World


def check_scored(config: Config, world: World) -> None:
    """Check, before anything runs, that a model trained on other classes can score those of this data set.

    Args:
        config: The experiment; without `evaluation.model_of` nothing is checked.
        world: What builds its model.

    Raises:
        ConfigError: Its rounds would train, its model has no text tower, or the values that it trains belong
            to the classes one by one.
    """
    if config.evaluation.model_of is None:
        if config.data.base_classes is not None:
            raise ConfigError(
                f"data.base_classes: {config.data.base_classes} has no effect without evaluation.model_of, "
                f"because its clients have no samples of these classes; set that, or leave it out"
            )
        return
    if config.rounds != 1:
        raise ConfigError(
            f"rounds: {config.rounds}, but with evaluation.model_of nothing is trained; set rounds=1"
        )
    model = world.skeleton()
    if model.text is None:
        raise ConfigError(
            f"model.name: the classifier of {model.label!r} has an output for each class that it was "
            f"trained on, and cannot score new ones; choose a model that makes it from the names of the "
            f"classes, such as model=clip_mini or clip_vit_b_16"
        )
    one_more = replace(world, num_classes=world.num_classes + 1, classes=()).skeleton()
    other = {name: entry.tensor.shape for name, entry in one_more.tensors().items() if entry.is_trained}
    for name, entry in model.tensors().items():
        if entry.is_trained and other[name] != entry.tensor.shape:
            raise ConfigError(
                f"tuning.name: {config.tuning['name']!r} trains {name!r}, which has values for each class, "
                f"so that it cannot score new ones; set tuning.train_head=false where it has that option, or "
                f"choose text_prompt (without class_specific), residual_adapter or attention_adapter"
            )
