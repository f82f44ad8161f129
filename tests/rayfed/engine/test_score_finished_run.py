"""The final model of a finished run is scored on other data, or refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy

import rayfed
from rayfed.config.schema import load_config, load_run
from rayfed.engine.score_finished_run import score_model_of
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from rayfed.federation.tensors_that_stay import STAYS
from rayfed.record.checkpoint import Checkpoints, from_file
from rayfed.record.folder import TENSORS
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.resume import main as resume
from rayfed.testing import small_setup, without_times
from rayfed.tuning.base import copies, load
from tests.conftest import SMALL, STEADY
from tests.rounding import equally_near, exactly, near

FEW = ("data.domains=[plain,street]", "data.val=0", "rounds=1", "model.options={depth: 1}")
CLIP = ("model=clip_mini", "tuning.train_head=false", "compare=[]")
OWN = (
    *(*CLIP, "local.stays=[lora_B]", "train.lr=20", "data.domains=[plain,street]", "data.val=0"),
    *("data.partition.clients_per_domain=3", "clients_per_round=4", "data.limit=80", "rounds=1"),
)
"""Six clients, of which four train and have their own values of some tensors."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The folder of base and new classes with the clients of OWN."""
    path = tmp_path_factory.mktemp("own") / "run"
    given = (f"data.cache={cache}", "cluster=inline", f"output={path}", "protocol=base_to_new")
    rayfed.simulate([*SMALL, *OWN, *given])
    return path / "cells"


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of that folder, which a test may change."""
    return shutil.copytree(whole.parent, tmp_path / "copy") / "cells"


def values_of(path, metric):
    """Score of each client on its test samples."""
    rows = [row for row in RecordedRun(path).rows("clients") if row["exchange"] == "report_clients"]
    return {row["client"]: row["value"] for row in rows if row["metric"] == metric}


def test_a_run_scored_on_its_own_data_has_its_own_scores(small):
    own = (*CLIP, *FEW[:3])
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


def test_clients_of_a_run_scored_on_its_own_data_have_their_own_tensors(whole, small):
    base = load_run(whole / "fedavg-base-seed0")
    model = f"evaluation.model_of={whole / 'fedavg-base-seed0'}"
    own = (*OWN, f"data.classes={json.dumps(base.data.classes)}", model)
    again, others = small(*own), small(*own, "data.partition.clients_per_domain=1", "clients_per_round=all")
    first, second = (read_rows(path)[-1] for path in (whole / "fedavg-base-seed0", again.path))
    assert {name: first[name] for name in ("accuracy", "loss")} == {
        name: second[name] for name in ("accuracy", "loss")
    }
    setup = prepared(load_run(others.path))
    assert (
        score_model_of(str(whole / "fedavg-base-seed0"), setup).stores == {}
    )  # its clients are not those of the run


def test_each_client_scores_the_new_classes_with_the_tensors_that_stay_at_it(whole):
    """Losses from the files of the run, with a plain model and nothing of the loop or an executor."""
    base, new = (prepared(load_run(whole / f"fedavg-{part}-seed0")) for part in ("base", "new"))
    assert list(new.partition.table) == list(base.partition.table)
    assert [c.domain for c in new.partition.clients] == [c.domain for c in base.partition.clients]
    saved = Checkpoints(whole / "fedavg-base-seed0").load(new.start, lambda rounds: True)
    kept = {client: from_file(file)[STAYS] for client, file in saved.stores.items()}
    model = new.context.build().eval()
    start = copies(model)
    found, initial, judge = {}, {}, {}
    for client in new.partition.clients:
        images = torch.from_numpy(np.array(new.dataset.images[client.test])).permute(0, 3, 1, 2) / 255
        x = (images - torch.tensor(model.mean).view(3, 1, 1)) / torch.tensor(model.std).view(3, 1, 1)
        y = torch.tensor(new.dataset.labels[client.test])
        for losses, own in ((found, kept.get(client.id, {})), (initial, {})):
            load(model, {**start, **saved.state.params, **own})
            with torch.no_grad():
                losses[client.id] = cross_entropy(model(x), y).item()
                if losses is found:
                    judge[client.id] = exactly(lambda m, x, y: cross_entropy(m(x), y), model, x, y).item()
    scores = values_of(whole / "fedavg-new-seed0", "loss")
    assert scores.keys() == found.keys()
    equally_near(*([torch.tensor([each[c] for c in found]).double()] for each in (found, scores, judge)))
    changed = {client for client in scores if abs(scores[client] - initial[client]) > 1e-4}
    assert changed == kept.keys()
    assert len(kept) == 4
    mean = np.mean(list(scores.values()))
    near(read_rows(whole / "fedavg-new-seed0")[-1]["loss"], mean, len(scores) + 2, precision=torch.float64)


def test_the_table_says_how_many_clients_have_initial_values(whole):
    words = " ".join((whole.parent / "report.md").read_text().split())
    assert (
        "fedavg: base and new classes are scored at each client, with the tensors that stay at it; " in words
    )
    assert "; 2 of 6 clients never trained and have initial values of these" in words


@pytest.mark.ray
@pytest.mark.parametrize("actors", [pytest.param(count, marks=STEADY) for count in (1, 2)])
def test_the_scores_of_clients_are_the_same_on_actors(actors, whole, folder, ray_cluster):
    shutil.rmtree(folder / "fedavg-new-seed0")
    assert resume([str(folder.parent), "--quiet", "cluster.executor=ray", f"cluster.actors={actors}"]) == 0
    assert values_of(folder / "fedavg-new-seed0", "loss") == values_of(whole / "fedavg-new-seed0", "loss")
    there, here = (without_times(read_rows(path / "fedavg-new-seed0")[-1]) for path in (folder, whole))
    assert there == here


def test_an_interrupted_protocol_goes_on_and_an_earlier_scoring_is_repeated(whole, folder):
    def again():
        assert resume([str(folder.parent), "--quiet"]) == 0
        assert values_of(folder / "fedavg-new-seed0", "loss") == values_of(whole / "fedavg-new-seed0", "loss")

    shutil.rmtree(folder / "fedavg-new-seed0")  # after the training
    again()
    (folder / "fedavg-new-seed0" / TENSORS).unlink()  # after the round of the scoring
    again()
    made = (folder / "fedavg-new-seed0" / "rounds.jsonl").stat().st_mtime_ns
    again()
    assert (folder / "fedavg-new-seed0" / "rounds.jsonl").stat().st_mtime_ns == made
    earlier = yaml.safe_load((folder / "fedavg-new-seed0" / "config.yaml").read_text())
    del earlier["data"]["base_classes"]
    (folder / "fedavg-new-seed0" / "config.yaml").write_text(yaml.safe_dump(earlier))
    again()
    assert (folder / "fedavg-new-seed0" / "rounds.jsonl").stat().st_mtime_ns > made


def test_own_tensors_that_are_lost_or_of_another_model_are_one_line(whole, folder):
    setup = prepared(load_run(whole / "fedavg-new-seed0"))
    tuning = replace(setup.context.tuning, rank=3)  # by which only what stays has another shape here
    other = replace(setup, context=replace(setup.context, tuning=tuning))
    with pytest.raises(ConfigError, match=r"^evaluation\.model_of: the tensors of .* set model, tuning"):
        score_model_of(str(folder / "fedavg-base-seed0"), other)
    stores = sorted((folder / "fedavg-base-seed0" / "checkpoints" / "stores").iterdir())
    stores[0].unlink()
    with pytest.raises(
        ConfigError, match=r"the checkpoint with the final model cannot be used .*put back what"
    ):
        score_model_of(str(folder / "fedavg-base-seed0"), setup)
    shutil.rmtree(folder / "fedavg-base-seed0" / "checkpoints")
    with pytest.raises(ConfigError, match=r"^evaluation\.model_of: .* has no checkpoint of the round of"):
        score_model_of(str(folder / "fedavg-base-seed0"), setup)


def test_an_older_checkpoint_is_not_taken_for_the_last_one(small):
    trained = small(*CLIP, *FEW[:2], "rounds=2")
    (trained.path / "checkpoints" / "round-000002" / "state.safetensors").unlink()
    setup = prepared(replace(load_run(trained.path), rounds=1))
    with pytest.raises(ConfigError, match=r"the checkpoint with the final model cannot be used"):
        score_model_of(str(trained.path), setup)


def test_clients_of_other_classes_are_for_scoring_only():
    with pytest.raises(ConfigError, match=r"^data\.base_classes: .* no effect without evaluation\.model_of"):
        small_setup("algorithm=fedavg", "data.base_classes=['0','1']", "data.classes=['2','3']")


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
        prepared(load_config([*given, "evaluation.model_of=nowhere", *overrides]))


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    setup = small_setup("algorithm=fedavg", *FEW)
    for folder, why in ((tmp_path / "none", "there is no such folder"), (tmp_path, "no round was finished")):
        with pytest.raises(ConfigError, match=rf"^evaluation\.model_of: .*{why}"):
            score_model_of(str(folder), setup)
