"""Texts from a file to a table: classified and written, by families of models and methods for LoRA."""

import csv
import json
import math
import shlex

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import rayfed
from benchmarks.gpu_check import dropping_as_devices
from rayfed import resume
from rayfed.config.schema import load_config
from rayfed.engine.loop import run_rounds
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared
from rayfed.federation.client import backward
from rayfed.federation.params import digest
from rayfed.objective import IGNORED, LanguageModeling, TextClassification
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.report.final_table import final_table
from rayfed.report.report_md import harness_command
from rayfed.testing import without_times
from rayfed.tuning.base import load
from tests.conftest import STEADY, quickly
from tests.pretended import pretended
from tests.rayfed.fast.test_group import check_agreement
from tests.rayfed.fast.test_group_device import OWN_LOOP, agree
from tests.rayfed.test_resume import killed, tables
from tests.rounding import equally_near, exactly_trained, near
from tests.tiny_models import CONFIGS, DECODERS, TEXTS, save

LORA = (
    "fedit",
    "ffa_lora",
    "flexlora",
    "fedsa_lora",
    "fedex_lora",
    "hetlora",
    "flora",
    "lora_fair",
    "rolora",
    "lora_a2",
    "fed_sb",
    "fedrot_lora",
    "slora",
    "feddpa",
)
OTHERS = ("fedra", "fedprox", "scaffold", "ditto", "moon", "fedavgm", "fedkseed")
TUNINGS = ("bitfit", "adapter", "ia3", "ssf", "head", "full", "exits")
USERS = ("ann", "bob", "eve", "joe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = " ".join(TEXTS).split()
    with (root / "mails.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["body", "folder", "user"])
        for i in range(48):
            label = ("card", "rate", "one")[i % 3]
            body = " ".join([label, *rng.choice(words, rng.integers(1, 9))])
            out.writerow([body, label, USERS[i % 4]])
    with (root / "asked.jsonl").open("w") as file:
        for i in range(48):
            prompt = " ".join(rng.choice(words, rng.integers(1, 6)))
            row = {"prompt": prompt, "completion": f"{i % 3} {i % 2}", "user": USERS[i % 4]}
            file.write(json.dumps(row) + "\n")
    for family in CONFIGS:
        save(family, root / family)
    for family in DECODERS:
        save(family, root / f"{family}-lm", language=True)
    return root


def settings(folder, cache, model, *overrides):
    language = model.endswith("-lm")
    file, columns = (
        ("asked.jsonl", "{prompt: prompt, completion: completion, client: user}")
        if language
        else ("mails.csv", "{text: body, label: folder, client: user}")
    )
    return (
        *(f"data={'jsonl' if language else 'csv'}", f"data.root={folder / file}", f"data.columns={columns}"),
        *(f"data.cache={cache}", f"model=hf/{folder / model}", "data.partition.scheme=natural"),
        *("data.partition.min_samples=1", "data.val=1", "data.test=2", "rounds=2", "cluster=inline"),
        *("train.batch_size=3", "tuning.rank=2", "figures=false", "tensorboard=false", *overrides),
    )


def setup_of(folder, cache, model, *overrides):
    overrides = settings(folder, cache, model, *overrides)
    if any(text.startswith("tuning=") and text != "tuning=lora" for text in overrides):
        overrides = tuple(text for text in overrides if text != "tuning.rank=2")
    if not any(text.startswith("algorithm=") for text in overrides):
        overrides = ("algorithm=fedavg", *overrides)
    return prepared(load_config(overrides))


def rounds_of(setup):
    return [*run_rounds(setup.experiment, InlineExecutor(setup.context, setup.weights), setup.start)]


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_classifies(folder, cache, family):
    setup = setup_of(folder, cache, family)
    assert len(setup.partition.training) == len(USERS)
    assert isinstance(setup.context.objective, TextClassification)
    last = rounds_of(setup)[-1]
    assert 0 <= last.row["accuracy"] <= 1
    assert 0 <= last.row["macro_f1"] <= 1
    assert -1 <= last.row["mcc"] <= 1
    assert last.scores["global"].by_class[2].sum() == sum(
        s.num for s in last.scores["global"].domains.values()
    )
    assert math.isfinite(last.row["loss"])
    assert not torch.equal(last.state.params["head.weight"], setup.start["head.weight"])


@pytest.mark.parametrize("family", quickly(CONFIGS, ["bert", "gpt2", "llama"]))
def test_every_family_learns(folder, cache, family):
    setup = setup_of(folder, cache, family, "tuning=full")
    model = setup.context.build().eval()  # without dropout
    x = torch.from_numpy(setup.dataset.images[np.arange(12)]).long()
    y = torch.from_numpy(setup.dataset.labels[:12].copy())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    losses = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = setup.context.objective.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("family", DECODERS)
def test_every_decoder_writes(folder, cache, family):
    first, last = rounds_of(setup_of(folder, cache, f"{family}-lm", "train.lr=0.02"))
    assert last.row["loss"] < first.row["loss"]
    assert last.row["perplexity"] == pytest.approx(math.exp(last.scores["global"].domains["all"].loss))
    assert 0 <= last.row["token_accuracy"] <= 1


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama-lm"])
@pytest.mark.parametrize("method", quickly([*LORA, *OTHERS], ["flexlora", "fedra"]))
def test_methods_run(folder, cache, family, method):
    if method in ("moon", "feddpa") and family == "llama-lm":
        with pytest.raises(ConfigError, match="language_modeling"):
            setup_of(folder, cache, family, f"algorithm={method}")
        return
    options = ("capacity=dynamic",) if method == "fedra" else ()
    setup = setup_of(folder, cache, family, f"algorithm={method}", "tuning=lora", *options)
    last = rounds_of(setup)[-1]
    moved = [n for n, v in last.state.params.items() if not torch.equal(v, setup.start[n])]
    assert moved
    assert math.isfinite(last.row["loss"])


@pytest.mark.parametrize("family", ["roberta", "qwen2-lm"])
@pytest.mark.parametrize("tuning", quickly(TUNINGS, ["bitfit", "ia3"]))
def test_tunings_run(folder, cache, family, tuning):
    if (tuning, family) == ("head", "qwen2-lm"):
        with pytest.raises(ConfigError, match="tuning=lora"):
            setup_of(folder, cache, family, f"tuning={tuning}")
        return
    setup = setup_of(folder, cache, family, f"tuning={tuning}")
    last = rounds_of(setup)[-1]
    assert all(not torch.equal(v, setup.start[n]) for n, v in last.state.params.items() if n.endswith("bias"))


@pytest.mark.parametrize("tuning", ["visual_prompt", "text_prompt", "gc_prompt"])
def test_prompts_of_other_models_are_refused(folder, cache, tuning):
    with pytest.raises(ConfigError, match=r"tuning\.name"):
        setup_of(folder, cache, "bert", f"tuning={tuning}")


@pytest.mark.numeric
@pytest.mark.parametrize(
    "case",
    quickly(
        [
            "bert tuning=lora",
            "llama-lm tuning=lora",
            "gpt2 tuning=lora",
            "roberta tuning=bitfit",
            "qwen2-lm tuning=ia3",
        ],
        ["bert tuning=lora", "llama-lm tuning=lora"],
    ),
)
def test_groups_agree_with_single_clients(folder, cache, case):
    model, *overrides = case.split()
    check_agreement(setup_of(folder, cache, model, *overrides))


def test_a_run_ends_in_a_table(folder, cache, tmp_path, capsys):
    options = settings(folder, cache, "gpt2-lm", "algorithm=fedavg", "model.size=8")
    result = rayfed.simulate([*options, f"output={tmp_path / 'run'}"], quiet=False)
    table = final_table(RecordedRun(result.path))
    [cut] = [note for note in table.notes if note.startswith("cut at model.size=8 tokens, of 48 texts: ")]
    assert "a part of the prompt of " in cut
    assert cut.endswith("; a larger model.size cuts fewer")
    assert cut.split("; ")[0] in " ".join(capsys.readouterr().out.split())
    assert "head: frozen; scored: the last evaluated round" in table.notes
    assert table.columns[-1] == "global perplexity"
    assert float(table.rows[0][-1]) == pytest.approx(read_rows(result.path)[-1]["perplexity"], abs=0.05)


@pytest.mark.ray
@pytest.mark.parametrize("model", quickly(["bert", "llama-lm"], []))
def test_one_process_and_two_actors_give_the_same_tensors(folder, cache, model, pool_of_two):
    setup = setup_of(folder, cache, model)
    alone = rounds_of(setup)[-1]
    *_, together = run_rounds(setup.experiment, pool_of_two(setup), setup.start)
    assert digest(together.state.params) == digest(alone.state.params)
    assert without_times(together.row) == without_times(alone.row)


@pytest.mark.parametrize("model", quickly(["bert", "gpt2-lm"], []))
def test_on_a_device_the_run_is_the_same(folder, cache, model):
    """Both are equally near to float64, with the same draws of dropout; LoRA's layers round otherwise."""
    setup = setup_of(folder, cache, model, "train.pack_texts=false")  # dropout draws nothing for pads
    with dropping_as_devices():
        here = rounds_of(setup)[-1]
        exact = exactly_trained(setup)
    with pretended(draws_as_cpu=True) as device:
        executor = InlineExecutor(setup.context, setup.weights, device=device.name)
        *_, there = run_rounds(setup.experiment, executor, setup.start)
        assert device.counts.kernels > 0
    equally_near(here.state.params, there.state.params, exact)
    counted = ({k: v for k, v in run.row.items() if isinstance(v, int)} for run in (here, there))
    assert next(counted) == next(counted)


@pytest.mark.numeric
@pytest.mark.parametrize("loop", ["train.clip_norm=null", OWN_LOOP])
@pytest.mark.parametrize("model", quickly(["bert", "llama-lm"], []))
def test_groups_on_a_device_agree_with_single_clients(folder, cache, model, loop):
    """In one loop for all clients, and each in its own."""
    agree(setup_of(folder, cache, model, loop))


@pytest.mark.parametrize(
    "model", [pytest.param("llama-lm", marks=STEADY), pytest.param("bert", marks=pytest.mark.slow)]
)
def test_a_killed_run_goes_on_to_the_same_bytes(folder, cache, tmp_path, model):
    options = [*settings(folder, cache, model, "algorithm=fedsa_lora", "tuning=lora"), "rounds=8"]
    whole = rayfed.simulate([*options, f"output={tmp_path / 'whole'}"])
    run = tmp_path / "killed"
    killed(options, run, 2)
    assert 2 <= len((run / "rounds.jsonl").read_text().splitlines()) < 8
    assert resume.main([str(run), "--quiet"]) == 0
    assert tables(run) == tables(whole.path)
    tensors = ("model", "params.safetensors")
    assert run.joinpath(*tensors).read_bytes() == whole.path.joinpath(*tensors).read_bytes()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_of_a_batch_are_weighted_by_their_answers(folder, cache, size):
    setup = setup_of(folder, cache, "llama-lm", "tuning.dropout=0")
    model = setup.context.build()
    model.train()
    data = setup.dataset
    rows = np.arange(5)
    x, y = torch.from_numpy(data.images[rows]).long(), torch.from_numpy(data.targets[rows])
    y[0, :] = IGNORED  # a text without an answer
    y[1, 2:] = IGNORED
    goal = LanguageModeling()

    def gradients(micro):
        model.zero_grad()
        backward(model, lambda batch: goal.loss(model(batch[0]), batch[1]), (x, y), micro, goal.count)
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradients(None)
    near(gradients(size), whole, 3000, float(whole.abs().max()))
    model.zero_grad()
    backward(model, lambda batch: goal.loss(model(batch[0]), batch[1]), (x, y), size)  # by rows
    by_rows = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (by_rows - whole).abs().max() > 0.01 * whole.abs().max()


def test_a_number_is_learned_for_a_pair_of_texts(folder, cache, tmp_path):
    """How many words two texts have in common."""
    rng = np.random.default_rng(1)
    words = " ".join(TEXTS).split()
    with (tmp_path / "near.csv").open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["one", "other", "label"])
        for i in range(60):
            text = [str(word) for word in rng.choice(words, 4)]
            out.writerow([" ".join(text), " ".join(text[: i % 5]) or "is", i % 5])
    columns = "data.columns={text: one, text_pair: other, score: label}"
    own = ["data=csv", f"data.root={tmp_path / 'near.csv'}", columns, "data.partition.clients_per_domain=2"]
    train = ["train.lr=0.01", "train.epochs=8", "rounds=6", "tuning=full", "train.optimizer=adamw"]
    shown = [f"data.cache={cache}", "cluster.executor=inline", "figures=false", "tensorboard=false"]
    model = f"model=hf/{folder / 'bert'}"
    result = rayfed.simulate(
        [*own, *train, *shown, model, "algorithm=fedavg", "data.test=0.3", f"output={tmp_path / 'run'}"]
    )
    table = final_table(RecordedRun(result.path))
    assert table.columns[4] == "global pearson"
    last = read_rows(result.path)[-1]
    assert last["pearson"] > 0.5
    assert last["spearman"] > 0.5


def test_clients_can_count_by_what_they_learned(folder, cache):
    setup = setup_of(folder, cache, "llama-lm", "server.weighting=tokens")
    first = rounds_of(setup)[0]
    rows = {name: setup.context.splits[name]["train"] for name in setup.experiment.clients}
    counts = {name: int(setup.dataset.targets.counts[own].sum()) for name, own in rows.items()}
    found = {row["client"]: row["weight"] for row in first.ledger.tables["aggregation"]}
    for name, count in counts.items():
        assert found[name] == pytest.approx(count / sum(counts.values()))
    lengths = sum(int(setup.dataset.images.lengths[own].sum()) for own in rows.values())
    assert first.row["local_tokens"] == lengths
    assert first.row["local_learned"] == sum(counts.values()) < lengths
    with pytest.raises(ConfigError, match=r"server\.weighting: tokens"):
        setup_of(folder, cache, "bert", "server.weighting=tokens")


def test_models_and_data_of_other_tasks_are_refused(folder, cache):
    with pytest.raises(ConfigError, match="no decoder"):
        prepared(
            load_config(
                [*settings(folder, cache, "bert-lm"), f"model=hf/{folder / 'bert'}", "algorithm=fedavg"]
            )
        )
    with pytest.raises(ConfigError, match=r"model\.name: the model is for classification"):
        prepared(load_config([*settings(folder, cache, "bert"), "model=vit_mini", "algorithm=fedavg"]))
    with pytest.raises(ConfigError, match="reads texts"):
        prepared(load_config([f"model=hf/{folder / 'bert'}", "algorithm=fedavg", "cluster=inline"]))


def test_a_user_learns_how_many_tokens_were_learned(folder, cache, tmp_path):
    for model, says in (("gpt2-lm", True), ("bert", False)):
        path = tmp_path / model
        rayfed.simulate([*settings(folder, cache, model, "algorithm=fedavg"), f"output={path}"])
        assert ("of them learned)" in " ".join(final_table(RecordedRun(path)).notes)) is says


PEFT_READS = ("bert", "roberta", "distilbert", "gpt2", "llama", "gpt2-lm", "qwen2-lm")


@pytest.mark.parametrize("model", quickly(PEFT_READS, ["bert", "gpt2-lm"]))
def test_peft_loads_what_was_trained(folder, cache, tmp_path, model):
    peft_agrees(folder, cache, tmp_path, model, "fedavg")


def test_peft_loads_a_fixed_a_and_a_trained_b(folder, cache, tmp_path):
    peft_agrees(folder, cache, tmp_path, "bert", "ffa_lora")


def peft_agrees(folder, cache, tmp_path, model, method):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    overrides = settings(folder, cache, model, f"algorithm={method}", "tuning.alpha=6", "train.lr=0.02")
    result = rayfed.simulate([*overrides, f"output={tmp_path / 'run'}"])
    setup = prepared(load_config(overrides))
    ours = setup.context.build()
    load(ours, load_file(result.path / "model" / "params.safetensors"))
    ours.eval()
    base, adapter = str(folder / model), result.path / "model"
    command = harness_command(RecordedRun(result.path))
    assert bool(command) == model.endswith("-lm")
    assert command in (result.path / "report.md").read_text()
    if model.endswith("-lm"):
        given = dict(pair.split("=") for pair in shlex.split(command)[4].split(","))
        assert (given["pretrained"], given["peft"]) == (base, str(adapter))
        adapter = given["peft"]
        theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    else:
        theirs = AutoModelForSequenceClassification.from_pretrained(
            base, dtype=torch.float32, num_labels=3, ignore_mismatched_sizes=True
        )
    theirs.config.pad_token_id = 1 if model == "roberta" else 0
    with torch.no_grad():
        x = torch.from_numpy(setup.dataset.images[np.arange(3)]).long()
        before = theirs(input_ids=x.clamp(min=0), attention_mask=(x >= 0).long()).logits
        adapted = PeftModel.from_pretrained(theirs, adapter).eval()
        for row in x:
            row = row[row >= 0][None]
            found = adapted(input_ids=row, attention_mask=torch.ones_like(row)).logits
            near(ours(row), found, 3000, float(found.abs().max()))
            assert not torch.allclose(
                found, before[:1, : found.shape[1]] if model.endswith("-lm") else before[:1]
            )


@pytest.mark.parametrize(
    ("method", "why"),
    [("fedsa_lora", "factors stay at the clients"), ("flora", "an update is more than its factors")],
)
def test_a_run_says_why_it_has_no_adapter(folder, cache, tmp_path, capsys, method, why):
    rayfed.simulate(
        [*settings(folder, cache, "gpt2-lm", f"algorithm={method}", "rounds=1"), f"output={tmp_path / 'r'}"],
        quiet=False,
    )
    assert f"no adapter for PEFT was written: {why}" in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "r" / "model" / "adapter_config.json").exists()


def focal(output, y):
    near = output.softmax(-1).gather(1, y[:, None])[:, 0]
    return -(1 - near).square() * near.log()


def share_of_first(output, y):
    return float((output.argmax(-1) == 0).float().mean())


def per_text(output, y):
    values = torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none")
    return values.view(y.shape).sum(1)


def of_experiment(folder, cache, model, task):
    overrides = settings(folder, cache, model, "algorithm=fedavg", "tuning=lora")
    return rayfed.Experiment.from_overrides(overrides).changed(task=task)


def test_a_loss_and_a_metric_of_a_user_replace_the_task_of_texts(folder, cache, tmp_path):
    task = rayfed.Task(loss=focal, over_set={"first": share_of_first}, percent=("first",))
    run = of_experiment(folder, cache, "bert", task).run(output=str(tmp_path / "run"))
    last = read_rows(tmp_path / "run")[-1]
    assert 0 <= last["first"] <= 1
    assert last["loss"] > 0
    assert "accuracy" not in last
    assert run.model() is not None


def test_a_loss_of_a_user_for_a_language_model(folder, cache, tmp_path):
    task = rayfed.Task(loss=per_text, metrics={"nll": per_text}, smaller=("nll",))
    of_experiment(folder, cache, "gpt2-lm", task).run(output=str(tmp_path / "run"))
    first, last = read_rows(tmp_path / "run")[-2:]
    assert first["nll"] == pytest.approx(first["loss"])
    assert last["nll"] > 0


def test_a_method_that_is_not_for_texts_is_refused_with_a_task_of_a_user(folder, cache):
    task = rayfed.Task(loss=focal, over_set={"first": share_of_first})
    own = of_experiment(folder, cache, "bert", task).changed(method="fedmix")
    with pytest.raises(ConfigError, match=r"not for text_classification|is for classification"):
        prepared(own.config())
