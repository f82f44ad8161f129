"""The methods that an experiment compares: in words, as cells, and with the models that they score."""

import pytest

import rayfed
from rayfed.config.schema import load_config
from rayfed.config.variants import comparisons
from rayfed.errors import ConfigError
from rayfed.experiment.study.methods import in_words, methods_study

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
    config = load_config(overrides)
    assert in_words(config, [config, *comparisons(config).values()]) == words


def test_each_compared_method_scores_the_model_that_it_trained_itself(tmp_path):
    config = load_config(["compare=[fedavg,fedprox]", "rounds=1", f"evaluation.model_of={tmp_path}"])
    cells = [
        f'{{"coordinates": {{"method": "{name}", "seed": 0}}, "folder": "cells/{name}", "description": "", '
        f'"rounds": 1, "sha256": "", "stopped": 0}}'
        for name in ("fedavg", "fedprox")
    ]
    head = '"names": ["method", "seed"], "score": null, "reported": "last", "protocol": ""'
    (tmp_path / "study.json").write_text(f'{{{head}, "cells": [{", ".join(cells)}]}}')
    found = {key: cell.config().evaluation.model_of for key, cell in methods_study(config, {}).cells.items()}
    assert found == {(name, 0): str(tmp_path / "cells" / name) for name in ("fedavg", "fedprox")}
    other = load_config(["algorithm=afl", "rounds=1", f"evaluation.model_of={tmp_path}"])
    with pytest.raises(
        ConfigError, match=r"^evaluation\.model_of: .* holds a study with 0 runs of afl; give"
    ):
        methods_study(other, {})


@pytest.mark.parametrize("protocol", ["base_to_new", "leave_one_out"])
def test_methods_and_parts_at_once_are_a_study_of_which_every_run_is_reachable(
    protocol, cache, tmp_path, monkeypatch
):
    """A `Run` of such an experiment could not be read: `repr`, `.accuracy` and `.history` raised."""
    experiment = rayfed.Experiment(
        compare=["fedavg", "fedprox"],
        model="clip_mini" if protocol == "base_to_new" else "vit_mini",
        tuning="lora",
        protocol=protocol,
        rounds=1,
        cluster="inline",
        train={"lr": 0.01, "epochs": 2},
        **{"tuning.train_head": protocol != "base_to_new", "data.limit": 24, "data.cache": str(cache)},
        **{"data.domains": ["plain", "street"], "data.val": 4, "local.mu": 1.0},
    )
    study = experiment.run(tmp_path / "s", quiet=True)
    parts = ("base", "new") if protocol == "base_to_new" else ("plain", "street")
    assert study.names == ("method", "part", "seed")
    assert list(study.cells) == [(name, part, 0) for name in ("fedavg", "fedprox") for part in parts]
    assert repr(study).startswith("<Study of 4 cells, 4 finished")
    for key in study.cells:
        run = study.runs[key]
        assert run.config.algorithm == key[0]
        assert 0 <= run.accuracy <= 1
        assert len(run.history) == 1
    first, other = ([study.runs[name, part, 0] for part in parts] for name in ("fedavg", "fedprox"))
    assert first[0].sha256 != other[0].sha256
    if protocol == "base_to_new":  # each method scores its own model
        assert (first[0].sha256, other[0].sha256) == (first[1].sha256, other[1].sha256)
    launched = []
    monkeypatch.setattr("rayfed.engine.session.launch", lambda *args, **rest: launched.append(args))
    assert rayfed.load(tmp_path / "s").scores.equals(study.scores)
    assert experiment.run(tmp_path / "s", quiet=True).scores.equals(study.scores)
    assert launched == []  # nothing is repeated
