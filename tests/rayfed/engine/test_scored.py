"""The final model of a finished run is scored on other data, or refused."""

import pytest

from rayfed.config.schema import load_config
from rayfed.engine.scored import scored
from rayfed.engine.setup import prepare
from rayfed.errors import ConfigError
from rayfed.record.readers import read_rows
from rayfed.testing.small import small_setup

FEW = ("data.domains=[plain,street]", "data.val=0", "rounds=1", "model.options={depth: 1}")


def test_a_run_scored_on_its_own_data_has_its_own_scores(small):
    own = ("model=clip_mini", "tuning.train_head=false", *FEW[:3], "compare=[]")
    trained = small(*own)
    again = small(*own, f"evaluation.model_of={trained.path}")
    first, second = (read_rows(run.path)[-1] for run in (trained, again))
    keys = [key for key in first if "accuracy" in key or key in ("loss", "sigma_client", "sigma_type")]
    assert len(keys) > 4
    assert {key: first[key] for key in keys} == {key: second[key] for key in keys}
    assert (second["bytes_up"], second["bytes_down"]) == (0, 0)
    assert trained.sha256 == again.sha256
    with pytest.raises(ConfigError, match=r"evaluation\.model_of: the tensors of .* are not those of this"):
        small(*own, "tuning.rank=1", f"evaluation.model_of={trained.path}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model=vit_mini", "tuning=lora"), "has an output for each class"),
        (("model=clip_mini", "tuning=lora"), "trains 'head.weight', which has values for each class"),
        (
            ("model=clip_mini", "tuning=text_prompt", "tuning.class_specific=true"),
            "trains 'text.context', which has values for each class",
        ),
        (("model=clip_mini", "tuning=text_prompt", "rounds=2"), "rounds: 2, but with evaluation.model_of"),
    ],
)
def test_models_that_cannot_score_new_classes_are_refused(overrides, message):
    given = (
        "algorithm=fedavg",
        "rounds=1",
        "model.pretrained=false",
        "evaluation.model_of=nowhere",
        "data.limit=12",
    )
    with pytest.raises(ConfigError, match=message):
        prepare(load_config([*given, "evaluation.model_of=nowhere", *overrides]))


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    setup = small_setup("algorithm=fedavg", *FEW)
    for folder, why in ((tmp_path / "none", "there is no such folder"), (tmp_path, "no round was finished")):
        with pytest.raises(ConfigError, match=rf"^evaluation\.model_of: .*{why}"):
            scored(str(folder), setup.experiment, setup.start)
