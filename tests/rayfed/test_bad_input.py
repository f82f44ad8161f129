"""Bad input stops before anything starts: exit code 2, and one line with key, value and what is allowed."""

import socket

import pytest
import yaml

from rayfed.engine.client_places import check_disk
from rayfed.errors import ConfigError
from rayfed.run import main
from tests.rayfed.malformed import last_wins

FREE_PORT = "127.0.0.1:9"  # the discard port: nothing listens there

CASES = {
    "unknown key": (["rouds=3"], ["rouds", "did you mean 'rounds'"]),
    "unknown nested key": (["train.lrr=1"], ["train.lrr", "did you mean 'lr'"]),
    "not an override": (["fedavg"], ["'fedavg'", "write algorithm=fedavg"]),
    "wrong type": (["rounds=many"], ["rounds", "'many' is not a whole number"]),
    "out of range": (["rounds=0"], ["rounds", "0", "it must be at least 1"]),
    "not one of": (["train.optimizer=lamb"], ["train.optimizer", "'lamb'", "sgd", "adamw"]),
    "negative rate": (["train.lr=-1"], ["train.lr", "-1", "greater than 0"]),
    "a section that is a value": (["train=5"], ["train"]),
    "unknown algorithm": (["algorithm=fedprx"], ["algorithm", "did you mean 'fedprox'", "fedavg"]),
    "unknown algorithm of a user": (["algorithm=no.such:METHOD"], ["algorithm", "no.such:METHOD"]),
    "unknown half": (["server.name=nothing"], ["server.name", "'nothing'"]),
    "unknown hyperparameter": (["algorithm=fedprox", "local.muu=1"], ["local.muu", "did you mean 'mu'"]),
    "hyperparameter out of range": (["algorithm=fedprox", "local.mu=-1"], ["local.mu", "-1"]),
    "unknown data set": (["data=pecs"], ["data", "did you mean 'pacs'"]),
    "a data set that we do not have": (
        ["data=imagenet9"],
        ["'imagenet9'", "data=image_folder data.root=DIR", "DIR/<domain>/<class>/<image>"],
    ),
    "a data set in capitals": (["data=PACS"], ["'PACS'", "did you mean 'pacs'"]),
    "a scheme as partition": (["data.partition=dirichlet"], ["write data.partition.scheme=dirichlet"]),
    "a list that the shell has split": (["compare=[fedavg,"], ["'[fedavg,'", "a bracket is not closed"]),
    "a long list of names": (
        ["experiment=fedgcr/table99"],
        [
            "did you mean 'fedgcr/table9'? Choose one of: fedgcr/table9, ",
            " more; rayfed list experiments shows all",
        ],
    ),
    "a config file as an override": (["configs/config.yaml"], ["write --config FILE"]),
    "several seeds": (["seeds=3"], ["seeds: no such key", "seed=1, seed=2"]),
    "a path as model": (["model=/no/such"], ["model: '/no/such' is a path", "set model=hf//no/such"]),
    "no folder": (["data=intents_mini", "model=hf//no/such"], ["the folder /no/such does not exist"]),
    "nearly lm_mini": (["data=intents_mini", "model=lama_mini"], ["did you mean 'lm_mini' or"]),
    "a list of seeds": (["seed=[0,1,2]"], ["seed: [0, 1, 2] is a list", "seed=1, seed=2"]),
    "a number in words": (["rounds=two"], ["rounds: 'two' is not a whole number"]),
    "neither": (["clients_per_round=some"], ["'some' is not 'all' or a whole number"]),
    "not a switch": (["deterministic=perhaps"], ["'perhaps' is not 'auto' or true or false"]),
    "a device of actors": (
        ["cluster=local", "cluster.device=cuda"],
        ["cluster.device", "'cuda' is for cluster=inline"],
    ),
    "graphs without a GPU": (
        ["cluster=local", "train.graphs=true", "data.limit=10", "cluster.num_gpus=0"],
        ["train.graphs: true", "clients run on the CPU here, where only false is allowed; leave it out"],
    ),
    "graphs of a process without a GPU": (
        ["train.graphs=true", "data.limit=10", "cluster.device=cpu"],
        ["train.graphs: true", "only false is allowed", "cluster.device=cuda"],
    ),
    "no such device": (["cluster=inline", "cluster.device=gpu"], ["cluster.device", "'gpu' is not 'auto'"]),
    "unknown model": (["model=resnet5000"], ["model.name", "'resnet5000'"]),
    "unknown tuning": (["tuning=loar"], ["tuning", "did you mean 'lora'"]),
    "missing folder": (["data=pacs", "data.root=/no/such/folder"], ["data.root", "/no/such/folder"]),
    "no folder given": (["data=pacs"], ["data.root"]),
    "unknown domain": (["data.held_out=stret"], ["data.held_out", "did you mean 'street'"]),
    "more clients than samples": (
        ["data.limit=4", "data.partition.clients_per_domain=900"],
        ["data.partition.clients_per_domain", "900"],
    ),
    "too little data for unequal clients": (["algorithm=fedgcr", "data.limit=24"], ["data.partition.factor"]),
    "no such partition": (["data.partition=no/such.parquet"], ["data.partition.file", "no/such.parquet"]),
    "cohort too large": (["clients_per_round=9"], ["clients_per_round", "9", "5 clients"]),
    "depth out of range": (["capacity=13"], ["capacity", "13", "1 to 12"]),
    "wrong number of depths": (["capacity=[1,2]"], ["capacity", "2 depths", "5 clients"]),
    "lora where nothing matches": (["tuning.sites=[attn.nothing]"], ["tuning.sites", "attn.nothing"]),
    "prompts on a mixer": (
        ["model=mixer_b16_224", "model.pretrained=false", "tuning=visual_prompt", "data.limit=10"],
        ["mixer_b16_224"],
    ),
    "cluster address without port": (
        ["cluster.address=somewhere", "cluster.executor=ray", "data.limit=10"],
        ["cluster.address", "somewhere", "host:port"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_code_2(case, capsys, tmp_path, cache, monkeypatch):
    overrides, words = CASES[case]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    output = tmp_path / "run"
    common = [f"output={output}", f"data.cache={cache}", "cluster=inline", "algorithm=fedavg"]
    code = main(last_wins([*common, *overrides]))
    error = capsys.readouterr().err.strip()
    assert code == 2, error
    assert len(error.splitlines()) == 1, error
    for word in words:
        assert word in error
    assert not output.exists()


@pytest.mark.parametrize("given", ["cluster.address", "RAY_ADDRESS"])
def test_a_cluster_that_does_not_answer_is_noticed_before_data_are_loaded(
    given, capsys, tmp_path, monkeypatch
):
    """Its exit code says that the command may succeed later."""
    monkeypatch.setattr("rayfed.experiment.runner.make_plan", lambda *_: pytest.fail("data were loaded"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests share one that is not asked here
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ["cluster.executor=ray", f"output={tmp_path / 'run'}"]
    if given == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", FREE_PORT)
    else:
        options.append(f"cluster.address={FREE_PORT}")
    assert main(options) == 75
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"error: cluster.address: no Ray cluster answers at '{FREE_PORT}'")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_nothing_of_a_refused_run_is_left(capsys, tmp_path, cache):
    main(
        [
            f"output={tmp_path / 'run'}",
            f"data.cache={cache}",
            "cluster=inline",
            "algorithm=fedavg",
            "data.held_out=stret",
        ]
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written(capsys, tmp_path, cache):
    (tmp_path / "file").write_text("")
    code = main([f"output={tmp_path / 'file' / 'run'}", f"data.cache={cache}", "cluster=inline"])
    assert code == 2
    assert "output" in capsys.readouterr().err


def test_the_sizes_of_a_full_disk_are_shown_in_units_that_fit(monkeypatch, tmp_path):
    monkeypatch.setattr("rayfed.engine.client_places.free_disk", lambda _: 1_200_000)
    with pytest.raises(ConfigError, match=r"has 1\.2 MB free, the run needs 3\.0 MB for tensors"):
        check_disk(tmp_path, 3e6)


def test_an_earlier_run_is_not_overwritten(small, capsys):
    done = small()
    assert main([f"output={done.path}"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert small(f"output={done.path}", "overwrite=true", "rounds=1").history["round"].tolist() == [1]


def test_a_config_file_that_is_not_one(capsys, tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1,")
    for name, word in (("bad.yaml", "not YAML"), ("missing.yaml", "cannot read")):
        assert main(["--config", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert word in error
        assert len(error.strip().splitlines()) == 1


def test_debug_shows_the_traceback(capsys, tmp_path):
    assert main(["rouds=3", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_cluster_that_never_speaks_is_given_up(tmp_path, capsys, cache):
    """Something accepts connections but is no Ray: the answer comes within the time-out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        overrides = [
            "algorithm=fedavg",
            "data.limit=10",
            "cluster.connect_timeout=2",
            f"cluster.address={address}",
        ]
        code = main([*overrides, f"output={tmp_path / 'r'}", f"data.cache={cache}"])
    assert code == 75  # it may answer later
    assert address in capsys.readouterr().err


def test_the_printed_config_is_that_of_the_run_and_nothing_is_created(small, capsys, tmp_path, monkeypatch):
    done = small("local.mu=0.5", "algorithm=fedprox")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--config", str(done.path / "config.yaml"), "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert shown == (done.path / "config.yaml").read_text()
    assert main(["algorithm=fedprox", "local.mu=0.5", "output=elsewhere", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["local"] == {
        "name": "fedprox",
        "mu": 0.5,
        "form": "squared",
        "stays": [],
    }
    for wrong in ("algorithm=fedprx", "model=vit_mni", "model.options={depht: 3}"):
        assert main([wrong, "--print-config"]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 1)
    assert main(["algorithm=fedgcr", "tuning=lora", "--print-config"]) == 2
    assert sorted(tmp_path.rglob("*")) == before
