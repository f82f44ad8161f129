"""Malformed configs: command lines and config files. Add a case by adding a line."""

import os
from pathlib import Path

import pytest

from tests.rayfed.malformed import Case, assert_refused

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
"""A few hundred bytes that stand for 9 ** 9 strings."""


PLAIN = "model: {name: vit_mini}\ndata: {name: digits, reader: digits_five_mini}\n"


def config(content, name="config.yaml"):
    """A case's `make`: the content as a file given with --config."""

    def make(folder: Path):
        file = folder / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ["--config", str(file)]

    return make


CASES = [
    # How a command line is written.
    Case("a list for a number", "rounds | [1, 2] | whole number", "rounds=[1, 2]"),
    Case("a fraction for a number", "rounds | 1.5", "rounds=1.5"),
    Case("yes for a number", "rounds | True", "rounds=yes"),
    Case("a negative seed", "seed | -1", "seed=-1"),
    Case("no key", "'=5' | key=value", "=5"),
    Case("a method without its group", "'fedprox' | write algorithm=fedprox", "fedprox"),
    Case("methods without brackets", "compare | write compare=[afl,fedprox]", "compare=afl,fedprox"),
    Case("a tracker without brackets", "trackers | write trackers=[wandb]", "trackers=wandb"),
    Case("more clients than there are", "clients_per_round | write 5, or all", "clients_per_round=100"),
    Case(
        "a residual network with prompts",
        "prompts | use tuning=full or tuning=head",
        "model=resnet10t | model.pretrained=false | model.options={} | model.size=32 | tuning=visual_prompt",
    ),
    Case(
        "a residual network with LoRA",
        "no uniform blocks | tuning=full or head",
        "model=resnet10t | model.pretrained=false | model.options={} | model.size=32 | tuning=lora",
    ),
    Case(
        "too many clients by class",
        "at most | data.partition.min_samples",
        "data.partition.scheme=dirichlet | data.partition.clients_per_domain=20",
    ),
    Case("an empty part of a key", "train..lr", "train..lr=1"),
    Case("a value below a value", "train.lr.x | lr", "train.lr=1 | train.lr.x=1"),
    Case("half a YAML list", "rounds | [1, | not a YAML value", "rounds=[1,"),
    Case(
        "a Python object on the command line", "output | not a YAML value", "output=!!python/name:os.system"
    ),
    Case("a number as a folder", "output | 5 | text", "output=5"),
    Case("a NUL in a folder", "output | NUL", 'output="a\\0b"'),
    Case(
        "a folder name no disk takes",
        "output | File name too long",
        make=lambda folder: [f"output={folder}/{'x' * 300}"],
    ),
    *(
        Case(f"a path no disk takes in {key}", f"{key} | File name too long", f"{key}={'x' * 300}")
        for key in ("data.root", "data.cache", "data.partition", "faults.trace", "model.weights")
    ),
    Case("terminal codes in a name", "algorithm | fed", "algorithm=fed\x1b[31mavg"),
    # Files of --config.
    Case("a binary config", "--config | not YAML", make=config(bytes(range(256)))),
    Case("an empty config", "--config | holds no keys", make=config("")),
    Case("a list as config", "--config | holds no keys", make=config("- rounds\n- 3\n")),
    Case(
        "a Python object in a config",
        "--config | not YAML",
        make=config("rounds: !!python/object/apply:os.getpid []\n"),
    ),
    Case("an alias bomb", "--config | alias", make=config(BOMB)),
    Case("a huge config", "--config | 1 MB", make=config("x: 1\n" * 400_000)),
    Case("a config nested too deeply", "--config | nested", make=config("[" * 5000)),
    Case("keys that are no names", "1: no such key", make=config("1: 2\n")),
    Case("a key twice", "--config | rounds | twice", make=config("rounds: 2\nrounds: 3\n")),
    Case("a folder as config", "--config | directory", make=lambda folder: ["--config", str(folder)]),
    Case("a config without a model", "model | missing", make=config("rounds: 2\n")),
    Case("a null section", "train", make=config(f"{PLAIN}train: null\n")),
    # Training and evaluation.
    Case("one beta", "train.betas", "train.betas=[0.9]"),
    Case("betas above 1", "train.betas | 2", "train.betas=[2, 3]"),
    Case("an infinite rate", "train.lr | inf", "train.lr=.inf"),
    Case("a rate that is no number", "train.lr | nan", "train.lr=.nan"),
    Case("an infinite momentum", "train.momentum | inf", "train.momentum=.inf"),
    Case("an empty batch", "train.batch_size | 0", "train.batch_size=0"),
    Case("no steps", "train.local_steps | 0", "train.local_steps=0"),
    Case(
        "a cache that is not exact",
        "train.cache_features | not exact",
        "train.cache_features=true | tuning.rank=2",
    ),
    Case("a negative interval", "evaluation.every | -1", "evaluation.every=-1"),
    Case("a protocol that does not exist", "protocol | k_fold", "protocol=k_fold"),
    Case("leave one out of one", "protocol | mnist", "protocol=leave_one_out | data.domains=[mnist]"),
    Case(
        "leave one out and hold one out",
        "data.held_out | street",
        "protocol=leave_one_out | data.held_out=street",
    ),
    Case("leave one out without validation", "data.val | 0", "protocol=leave_one_out | data.val=0"),
    # Parts that do not exist or do not fit.
    Case("a half that needs another", "algorithm | needs", "algorithm=depthfl | tuning=lora"),
    Case(
        "a rule that needs another tuning",
        "server.lora_agg | tuning.residual=true",
        "server.lora_agg=residual",
    ),
    Case("a method that is no method", "algorithm | rayfed.errors", "algorithm=rayfed.errors:ConfigError"),
    Case("a method without a module", "algorithm | ':x'", "algorithm=:x"),
    Case("a comparison with nothing", "compare | nothing", "compare=[fedprox, nothing]"),
    Case("a tuning that does not exist", "tuning | '{}'", "tuning={}"),
    Case("a tuning without a name", "tuning.name | missing", make=config(f"{PLAIN}tuning: {{rank: 2}}\n")),
    Case("a number as a tuning", "tuning.name | 5", "tuning.name=5"),
    Case("a number as a half", "server.name | 5", "server.name=5"),
    *(
        Case(f"{what} as {key}", f"{key} | {shown}", f"{key}={shown}")
        for key in ("algorithm", "server.name", "local.name", "tuning.name", "sampling", "model.name", "task")
        for what, shown in (("a list", "[]"), ("a section", "{}"))
    ),
    Case("a tuning key that does not exist", "tuning.rnak | did you mean 'rank'", "tuning.rnak=2"),
    Case("a rank of 0", "tuning.rank | 0", "tuning.rank=0"),
    Case("a number as a model", "model.name | 5", "model.name=5"),
    Case("a path as a model", "model.name | ../x", "model.name=../x"),
    Case("options of another model", "model.options | depht", "model.options={depht: 3}"),
    Case("a depth in words", "model.options | many", "model.options={depth: many}"),
    Case("no blocks", "model.name | no uniform blocks", "model.options={depth: 0}"),
    Case(
        "half the blocks of packaged weights",
        "model.pretrained | does not fit",
        "model.pretrained=true | model.options={depth: 13}",
    ),
    Case("heads that do not divide the width", "model.options", "model.options={num_heads: 3}"),
    Case("a size that patches do not divide", "model.size | 7", "model.size=7"),
    Case("two means", "model.mean", "model.mean=[0, 0]"),
    Case("a deviation of 0", "model.std | 0", "model.std=[0, 0, 0]"),
    Case("a template without a name", "model.template | a cat", "model=clip_mini | model.template=a cat"),
    # Capacities and cohorts.
    Case("no capacities", "capacity | 0 depths", "capacity=[]"),
    Case("no tiers", "capacity", "capacity={}"),
    Case("a capacity of 0", "capacity | 0 blocks", "capacity=0"),
    Case("one capacity too deep", "capacity | 99", "capacity=[1, 2, 1, 2, 99]"),
    Case("capacities in words", "capacity | sometimes", "capacity=sometimes"),
    Case("a tier too deep", "capacity | 99", "capacity={99: 1.0}"),
    Case("a negative share", "capacity | -1", "capacity={4: -1, 2: 2}"),
    Case("a share that is no number", "capacity | nan", "capacity={4: .nan, 2: 1}"),
    Case("nobody takes part", "clients_per_round | 0", "clients_per_round=0"),
    Case("a draw that does not exist", "sampling | random", "sampling=random"),
    # Who has what.
    Case(
        "a scheme that does not exist",
        "data.partition.scheme | by_weekday",
        "data.partition.scheme=by_weekday",
    ),
    Case("a concentration of 0", "data.partition.alpha | 0", "data.partition.alpha=0"),
    Case("a concentration that is no number", "data.partition.alpha | nan", "data.partition.alpha=.nan"),
    Case("no clients", "data.partition.clients_per_domain | 0", "data.partition.clients_per_domain=0"),
    Case(
        "clients for two of five domains",
        "data.partition.clients_per_domain | 2 numbers | 5 domains",
        "data.partition.clients_per_domain=[1, 2]",
    ),
    Case("a factor below 1", "data.partition.factor | 0.5", "data.partition.factor=0.5"),
    Case(
        "an order without all domains",
        "data.partition.order",
        "data.partition.scheme=imbalanced | data.partition.order=[street]",
    ),
    Case(
        "clients with fewer samples than they need",
        "data.partition.min_samples",
        "data.partition.scheme=dirichlet | data.partition.min_samples=900",
    ),
    Case("validation and test leave nothing", "data.val + data.test | 0.6", "data.val=0.6 | data.test=0.5"),
    Case("a test split in words", "data.test | oficial", "data.test=oficial"),
    Case("no images", "data.limit | 0", "data.limit=0"),
    Case("no domains", "data.domains: [] is empty | street", "data.domains=[]"),
    Case("a domain twice", "data.domains | twice", "data.domains=[street, street]"),
    Case(
        "every domain held out",
        "data.held_out | leaves no domain",
        "data.domains=[street] | data.held_out=street",
    ),
    Case("a class that does not exist", "data.classes | zero", "data.classes=[zero]"),
    Case("no class", "data.classes: [] | list some", "data.classes=[]"),
    Case("no new class", "data.new_classes: [] | list some", "protocol=base_to_new | data.new_classes=[]"),
    Case("a reader that does not exist", "data.reader | nothing", "data.reader=nothing"),
    Case(
        "a reader that is no reader",
        "data.reader | rayfed.errors:unknown",
        "data.reader=rayfed.errors:unknown",
    ),
    Case("a section for a name", "data.name", "data.name=[a]"),
    # Where it runs.
    Case(
        "more CPUs than there are",
        "cluster.actors=1 | 4 actors | 1 CPU",
        "cluster.executor=ray | cluster.num_cpus=1 | cluster.actors=4 | cluster.cpus_per_actor=1",
    ),
    Case(
        "a GPU where there is none",
        "cluster.gpus_per_actor | no GPU",
        "cluster.executor=ray | cluster.num_gpus=0 | cluster.gpus_per_actor=0.5",
    ),
    Case("no actors", "cluster.actors | 0", "cluster.actors=0"),
    Case("a negative GPU", "cluster.gpus_per_actor | -1", "cluster.gpus_per_actor=-1"),
    Case("an executor that does not exist", "cluster.executor | slurm", "cluster.executor=slurm"),
]

if os.geteuid():  # the administrator may read everything

    def _unreadable(folder: Path):
        (folder / "config.yaml").touch(mode=0)
        return ["--config", str(folder / "config.yaml")]

    CASES.append(Case("a config nobody may read", "--config | Permission denied", make=_unreadable))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case, tmp_path, cache, capsys, monkeypatch):
    assert_refused(case, tmp_path, cache, capsys, monkeypatch)
