"""What a command says it will run."""

from pathlib import Path

import pytest

from rayfed.config.schema import load_config
from rayfed.config.variants import comparisons
from rayfed.experiment.plan import Plan, first_run


def plan(*overrides):
    config = load_config(overrides)
    others = comparisons(config, Path("runs/x"))
    parts = {name: Plan(config=other, path=Path("runs/x"), setup=object()) for name, other in others.items()}
    return Plan(config=config, path=Path("runs/x"), setup=object(), parts=parts)


REASON = (
    "fedclip (3 rounds), zero_shot (1 round); zero_shot trains nothing, it is the reference that "
    "model=clip_mini brings: compare=[] leaves it out"
)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=fedclip", "rounds=3"], REASON),
        (["algorithm=fedclip", "rounds=3", "compare=[]"], "fedclip (3 rounds)"),
        (["algorithm=zero_shot", "rounds=1"], "zero_shot (1 round)"),
        (["compare=[fedavg,afl]", "rounds=2"], "fedavg, afl (2 rounds each)"),
        (
            ["compare=[fedavg,promptfl,fedbn]", "rounds=2", "tuning=lora"],
            "fedavg, promptfl, fedbn (2 rounds each); promptfl trains tuning=lora here, not its own "
            "tuning=text_prompt; fedbn trains tuning=lora here, not its own tuning=full",
        ),
        (["algorithm=promptfl", "tuning=lora", "rounds=2", "compare=[]"], "promptfl (2 rounds)"),
    ],
)
def test_compared_methods_are_named_with_the_reason_for_one_that_nobody_asked_for(overrides, words):
    assert plan(*overrides).in_words == words


def test_folds_are_named_once_with_the_same_words():
    fold = plan("algorithm=fedclip", "rounds=3")
    whole = Plan(config=fold.config, path=fold.path, parts={"street": fold})
    assert whole.in_words == REASON


def test_the_first_run_of_a_protocol_or_the_experiment_itself():
    single = load_config(["data.shots=2"])
    assert first_run(single) is single
    few = first_run(load_config(["protocol=few_shot", "data.shots=[3,1]"]))
    assert (few.data.shots, few.protocol) == (3, "single")
