"""Configurations of PEFT: trained and read as by PEFT, and refused where they do not fit."""

import csv
import json
from dataclasses import replace

import peft
import pytest
import torch
import yaml
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load
from torch import nn
from torch.nn import functional as F

import rayfed
from rayfed.config.schema import compatible_parts, load_config
from rayfed.engine.loop import run_rounds
from rayfed.engine.record_rounds import RecordSettings
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.models.build import build_backbone
from rayfed.models.shared_weights import attach, dump
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.peft import Peft, plain_config
from tests.rayfed.models.small import small
from tests.rounding import equally_near
from tests.tiny_models import TEXTS, save

TARGETS = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj"], "vit": ["qkv"]}
KINDS = {
    "dora": lambda targets: peft.LoraConfig(use_dora=True, r=2, target_modules=targets),
    "pissa": lambda targets: peft.LoraConfig(init_lora_weights="pissa", r=2, target_modules=targets),
    "vera": lambda targets: peft.VeraConfig(r=2, target_modules=targets),
    "loha": lambda targets: peft.LoHaConfig(r=2, target_modules=targets),
    "oft": lambda targets: peft.OFTConfig(oft_block_size=4, target_modules=targets),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("peft")
    with (root / "mails.csv").open("w", newline="") as file:
        rows = [(f"{text} {word}", word, "ann") for text in TEXTS[:3] for word in ("card", "rate", "one")]
        csv.writer(file).writerows([("body", "folder", "user"), *rows])
    with (root / "asked.jsonl").open("w") as file:
        for text in TEXTS * 2:
            file.write(json.dumps({"prompt": text[:9], "completion": text[9:30], "user": "ann"}) + "\n")
    save("bert", root / "bert", num_labels=3, classifier_dropout=0.0)
    save("llama", root / "llama", language=True)
    return root


def settings(folder, cache, model):
    """Keys of an experiment with one client, which takes three steps, each with all its examples."""
    keys = ["algorithm=fedavg", "rounds=1", "cluster=inline", "train.batch_size=64", "train.epochs=3"]
    keys += ["train.optimizer=sgd", "train.lr=0.5", "train.momentum=0", "data.val=1", f"data.cache={cache}"]
    if model == "vit":
        return [*keys, "data=digits_five_mini", "data.domains=[plain]", "data.limit=12", "model=vit_mini"]
    keys += ["data.partition.scheme=natural", "data.partition.min_samples=1", "data.test=1"]
    keys += ["train.pack_texts=false", f"model=hf/{folder / model}"]
    if model == "llama":
        return [*keys, "data=jsonl", f"data.root={folder / 'asked.jsonl'}", "data.columns={client: user}"]
    columns = "{text: body, label: folder, client: user}"
    return [*keys, "data=csv", f"data.root={folder / 'mails.csv'}", f"data.columns={columns}"]


def setup_of(folder, cache, model, config):
    tuning = {"tuning": {"name": "peft", "config": plain_config(config)}}
    return prepared(load_config([*settings(folder, cache, model), "tuning=peft"], more=tuning))


def files_of(setup, params, tmp_path):
    return RecordSettings.of(setup, tmp_path, resume=False).files(params)


def library_model(folder, model, setup):
    """The model as a user of its library has it."""
    import transformers

    if model == "vit":
        classes = len(setup.context.classes)
        net = build_backbone(setup.context.model, classes, 0).net
        net.head = nn.Linear(64, classes)
        return net
    kind = "AutoModelForCausalLM" if model == "llama" else "AutoModelForSequenceClassification"
    own = {} if model == "llama" else {"num_labels": len(setup.context.classes)}
    return getattr(transformers, kind).from_pretrained(folder / model, dtype=torch.float32, **own)


def by_hand(setup, folder, model, config, start, exact):
    """Three steps of SGD on a model of PEFT; returns the tensors of its file.

    Args:
        start: The file of the start of RayFed, for what is drawn; None: PEFT's start has no random numbers.
    """
    theirs = peft.get_peft_model(library_model(folder, model, setup), config)
    heads = {name: value for name, value in start.items() if name.rpartition(".")[0].endswith(HEADS)}
    drawn = heads if config.peft_type == "LORA" and config.init_lora_weights == "pissa" else start
    whole = {name.removeprefix("base_model.model."): value for name, value in heads.items()}
    theirs.get_base_model().load_state_dict(whole, strict=False)
    set_peft_model_state_dict(theirs, {name: v for name, v in drawn.items() if name not in heads})
    theirs.eval()
    if model != "llama":
        for name, parameter in theirs.named_parameters():
            if name.rpartition(".")[0].endswith(HEADS):
                parameter.requires_grad_(True)
    theirs.double() if exact else theirs.float()
    worker = InlineExecutor(setup.context, setup.weights).worker
    (rows,) = (part.train for part in setup.partition.listed)
    rows = sorted(rows.tolist())
    x = worker._normalize(torch.from_numpy(setup.dataset.images[rows]))
    y = torch.from_numpy(setup.dataset.targets[rows]).long()
    x = x.double() if exact and x.is_floating_point() else x
    live = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(live.values(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        if model == "vit":
            loss = F.cross_entropy(theirs(x), y)
        else:
            logits = theirs(input_ids=x.clamp(min=0), attention_mask=(x >= 0).long()).logits
            loss = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
    found = get_peft_model_state_dict(theirs, save_embedding_layers=False)
    own = {f"base_model.model.{n}": v for n, v in theirs.get_base_model().state_dict().items()}
    return {name: v.detach() for name, v in {**found, **{n: own[n] for n in heads}}.items()}


HEADS = ("classifier", ".head")
"""Ends of the names of classifiers."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", TARGETS)
def test_one_client_trains_as_peft_by_hand(folder, cache, tmp_path, model, kind):
    config = KINDS[kind](TARGETS[model])
    setup = setup_of(folder, cache, model, config)
    assert len(setup.partition.training) == 1
    assert "one by one, because PEFT" in setup.group.sentence
    *_, last = run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)
    params = last.state.params
    start, ours = (
        load(files_of(setup, each, tmp_path)["adapter_model.safetensors"]) for each in (setup.start, params)
    )
    hand = by_hand(setup, folder, model, KINDS[kind](TARGETS[model]), start, exact=False)
    judge = by_hand(setup, folder, model, KINDS[kind](TARGETS[model]), start, exact=True)
    if kind == "pissa":
        ours = {
            name: value[:2]
            if name.endswith("lora_A.weight")
            else value[:, :2]
            if name.endswith("lora_B.weight")
            else value
            for name, value in ours.items()
        }
    trained = [name for name in hand if ours[name].dtype == torch.float32]
    assert len(trained) == len(ours)
    equally_near(*({name: each[name] for name in trained} for each in (hand, ours, judge)))
    moved = [name for name in params if not torch.equal(params[name], setup.start[name])]
    assert sum(".peft" in name for name in moved) >= 4


def outputs(net, x):
    """Outputs of a network of a library for a batch as RayFed has it."""
    if x.is_floating_point():
        return net(x)
    return net(input_ids=x.clamp(min=0), attention_mask=(x >= 0).long()).logits


OTHERS = {
    "rslora": peft.LoraConfig(
        use_rslora=True, r=4, lora_dropout=0.1, bias="all", target_modules=["query", "value"]
    ),
    "olora": peft.LoraConfig(
        init_lora_weights="olora", r=4, use_rslora=True, target_modules=r".*\.(query|key)"
    ),
    "layers": peft.LoraConfig(
        target_modules=["query", "dense"], r=2, layers_to_transform=[1], layers_pattern="layer"
    ),
    "linear": peft.LoraConfig(target_modules="all-linear", r=2),
    "patterns": peft.LoraConfig(
        init_lora_weights="pissa",
        rank_pattern={"query": 2},
        alpha_pattern={"value": 4},
        target_modules=["query", "value"],
    ),
    "saved": peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier", "LayerNorm"]),
    "ia3": peft.IA3Config(target_modules=["key", "output.dense"], feedforward_modules=["output.dense"]),
    "lokr": peft.LoKrConfig(r=2, target_modules=["query"]),
    "boft": peft.BOFTConfig(boft_block_size=4, target_modules=["query"]),
    "norms": peft.LNTuningConfig(target_modules=["LayerNorm"]),
    "shira": peft.ShiraConfig(r=2, target_modules=["query"]),
    "fourierft": peft.FourierFTConfig(n_frequency=9, target_modules=["query"]),
    "hra": peft.HRAConfig(r=2, target_modules=["query"]),
}


@torch.no_grad()
@pytest.mark.filterwarnings(
    "ignore"
)  # those of PEFT, about extensions that are not installed and sparse tensors
@pytest.mark.parametrize("kind", OTHERS)
def test_peft_loads_what_was_trained_on_the_untouched_model(folder, cache, tmp_path, kind):
    """A process also builds the same modules without values, and gets those of the one that has them."""
    setup = setup_of(folder, cache, "bert", OTHERS[kind])
    model = setup.context.build().eval()
    bare = setup.context.skeleton()
    attach(bare, dump(model))
    x = torch.from_numpy(setup.dataset.images[:4]).long()
    assert torch.equal(bare.eval()(x), model(x))
    untuned = library_model(folder, "bert", setup).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in trainable(model).values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    params = {name: parameter.detach().clone() for name, parameter in trainable(model).items()}
    for name, content in files_of(setup, params, tmp_path).items():
        (tmp_path / name).write_bytes(content)
    before = outputs(untuned, x)
    weight = untuned.bert.encoder.layer[1].attention.self.query.weight.clone()
    loaded = peft.PeftModel.from_pretrained(untuned, tmp_path).eval()
    judged = peft.PeftModel.from_pretrained(library_model(folder, "bert", setup), tmp_path).eval().double()
    equally_near([outputs(loaded, x)], [model(x)], [outputs(judged, x)])
    query = loaded.get_base_model().bert.encoder.layer[1].attention.self.query
    assert torch.equal(getattr(query, "base_layer", query).weight, weight)
    assert float((before - outputs(loaded, x)).norm()) > 0.01


def own_network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def own_data():
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(20, 8, generator=generator), torch.arange(20) % 3) for name in "ab"}


def test_a_network_of_a_user_is_not_changed_and_peft_reads_its_adapter(tmp_path):
    net = own_network()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    config = peft.LoraConfig(init_lora_weights="olora", r=3, target_modules=["0", "2"])
    run = rayfed.Experiment(
        model=net, data=own_data(), tuning=config, rounds=2, cluster="inline", train={"lr": 0.05}
    ).run()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    x = own_data()["a"][0]
    ours = run.model()
    loaded = peft.PeftModel.from_pretrained(own_network(), run.adapter(tmp_path)).eval()
    equally_near([ours(x)], [loaded(x)], [run.model().double()(x.double())])
    assert float((net(x) - ours(x)).detach().norm()) > 0.1
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ["0", "2"]


@pytest.mark.filterwarnings("ignore")  # torch's, about sparse tensors
@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(init_lora_weights="pissa", r=2, target_modules=["0"]),
        peft.ShiraConfig(r=2, target_modules=["0"]),
    ],
    ids=["pissa", "shira"],
)
def test_processes_without_the_values_of_a_users_network_build_the_same(config):
    setup = prepared(
        rayfed.Experiment(model=own_network(), data=own_data(), tuning=config, rounds=1).config()
    )
    there = replace(setup.context, network=replace(setup.context.network, values=None))
    bare = there.skeleton()
    attach(bare, setup.weights)
    x = torch.rand(3, 8)
    assert torch.equal(bare.eval()(x), setup.context.build().eval()(x))


@pytest.mark.slow
def test_ray_and_one_process_give_the_same_bits_and_a_saved_config_runs_again(tmp_path):
    config = peft.VeraConfig(r=2, target_modules=["qkv"], vera_dropout=0.1)
    config.save_pretrained(tmp_path / "vera")
    keys = ["data=digits_five_mini", "data.limit=12", "model=vit_mini", "rounds=1", "algorithm=fedavg"]
    keys += ["tuning=peft", f"tuning.config={tmp_path / 'vera'}", "tensorboard=false", "figures=false"]
    one = rayfed.simulate([*keys, "cluster=inline", f"output={tmp_path / 'one'}"])
    noted = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    assert noted["tuning"] == {
        "name": "peft",
        "config": {"peft_type": "VERA", "r": 2, "target_modules": ["qkv"], "vera_dropout": 0.1},
        "train_head": True,
    }
    (tmp_path / "vera" / "adapter_config.json").unlink()
    two = rayfed.simulate(
        load_config(
            ["cluster=local", "cluster.actors=2", f"output={tmp_path / 'two'}"],
            tmp_path / "one" / "config.yaml",
        ).alone()
    )
    assert one.sha256 == two.sha256


def test_the_same_seed_gives_the_same_start_and_another_seed_another_one():
    tuning = Peft(config={"peft_type": "LORA", "target_modules": ["fc1"], "init_lora_weights": "orthogonal"})
    starts = [apply_tuning(small("vit"), tuning, seed) for seed in (0, 0, 1)]
    first, same, other = ({n: p.detach() for n, p in trainable(each).items()} for each in starts)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_dropout_of_an_adapter_is_on_while_it_trains_and_off_in_what_is_frozen():
    config = {"peft_type": "LOHA", "r": 2, "target_modules": ["fc1"], "module_dropout": 0.5}
    model = apply_tuning(small("vit"), Peft(config=config), 0)
    model.train()
    adapted = model.stack.get_submodule("0").mlp.fc1
    assert adapted.training
    assert not adapted.base_layer.training
    assert not model.stack.get_submodule("0").mlp.fc2.training
    model.eval()
    assert not adapted.training


LORA = {"peft_type": "LORA", "target_modules": ["fc1"]}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "tuning.config: peft_type is missing in {}; write it as PEFT does, as LORA"),
        ({"peft_type": "LORRA"}, "tuning.config.peft_type: 'LORRA' does not exist; did you mean 'LORA'?"),
        (
            {"peft_type": "PREFIX_TUNING"},
            "peft_type=PREFIX_TUNING learns a prompt; use a config that changes",
        ),
        (
            {"peft_type": "ADALORA"},
            "peft_type=ADALORA needs a call of PEFT's rank allocator after every step",
        ),
        ({"peft_type": "XLORA"}, "peft_type=XLORA needs adapters or tasks that were prepared before"),
        ({**LORA, "rank": 4}, "tuning.config: 'rank' does not exist"),
        ({**LORA, "init_lora_weights": "eva"}, "init_lora_weights='eva' needs data or a quantized network"),
        ({**LORA, "target_parameters": ["a"]}, "target_parameters is not supported; write target_modules"),
        ({**LORA, "layers_to_transform": [1], "target_modules": ".*fc1"}, "tuning.config: LORA: "),
    ],
)
def test_configs_that_cannot_be_trained_are_refused_in_one_line(config, message):
    with pytest.raises(ConfigError) as refused:
        Peft(config=config)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"peft_type": "LORA", "target_modules": ["q_proj"]},
            "tuning.config: LORA does not fit 'vit_tiny_patch16_224' (Target modules {'q_proj'} not found in "
            "the base model. Please check the target modules and try again.); its linear layers are: blocks",
        ),
        (
            {"peft_type": "VBLORA", "r": 2, "num_vectors": 8, "vector_length": 4, "target_modules": ["fc1"]},
            "tuning.config: it trains tensors that several blocks of 'vit_tiny_patch16_224' have in common",
        ),
    ],
)
def test_configs_that_do_not_fit_the_model_are_refused_in_one_line(config, message):
    with pytest.raises(ConfigError) as refused:
        apply_tuning(small("vit"), Peft(config=config), 0)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_layers_that_are_read_without_a_call_are_refused():
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    config = peft.LoraConfig(r=2, target_modules=["out_proj"])
    with pytest.raises(
        ConfigError, match=r"self_attn\.out_proj is part of an attention that reads its weights"
    ):
        prepared(
            rayfed.Experiment(
                model=nn.Sequential(
                    nn.Unflatten(1, (2, 4 * 1)), nn.Linear(4, 8), net, nn.Flatten(), nn.Linear(16, 3)
                ),
                data=own_data(),
                tuning=config,
                rounds=1,
            ).config()
        )


@pytest.mark.parametrize("method", ["flexlora", "ffa_lora", "fedsa_lora", "fed_sb"])
def test_methods_for_the_factors_of_lora_refuse_it(method):
    keys = [f"algorithm={method}", "tuning=peft", "tuning.config={peft_type: LORA, target_modules: [qkv]}"]
    with pytest.raises(
        ConfigError, match=f"tuning: 'peft' cannot be used with algorithm={method}, which needs"
    ):
        compatible_parts(load_config(keys))


def test_rules_for_the_factors_of_lora_refuse_it():
    keys = ["algorithm=fedavg", "tuning=peft", "tuning.config={peft_type: LORA, target_modules: [qkv]}"]
    with pytest.raises(ConfigError, match="lora_agg: 'product_svd' combines the factors of tuning=lora"):
        compatible_parts(load_config([*keys, "server.lora_agg=product_svd"]))


def test_a_missing_file_is_named_in_one_line():
    with pytest.raises(
        ConfigError, match=r"tuning\.config: cannot read 'nowhere\.json': No such file"
    ) as refused:
        load_config(["algorithm=fedavg", "tuning=peft", "tuning.config=nowhere.json"])
    assert refused.value.exit_code == 2
