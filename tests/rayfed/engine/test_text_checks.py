"""A network of texts gets what its tokenizer returns and gives the library's logits, or is refused."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

import rayfed
from rayfed.config.schema import load_config
from rayfed.data.text import TYPE_BITS, Text
from rayfed.data.tokens import Tokenized
from rayfed.engine import text_checks
from rayfed.errors import ConfigError
from rayfed.experiment.plan import prepared
from rayfed.models import language
from tests.rayfed.data.test_tokens import Texts
from tests.rayfed.fast.test_group import check_agreement
from tests.rayfed.fast.test_group_device import agree
from tests.rounding import near

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{i}" for i in range(40)]
KNOWN = len(SPECIAL) + len(WORDS)
SIZES = {
    "vocab_size": KNOWN,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
OF_DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 2}
OWN = {
    "electra": {"embedding_size": 8},
    "deberta": OF_DEBERTA,
    "deberta-v2": OF_DEBERTA,
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "roberta": {"max_position_embeddings": 66, "type_vocab_size": 1},
}
TYPED = ("bert", "electra", "deberta", "deberta-v2", "mobilebert", "ernie", "roformer", "gpt2")
"""Families whose networks add something for the type of a token."""


def tokenizer(types=True, **more):
    found = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token="[SEP]", model_input_names=names, **named, **more
    )


def save(folder, family, types=True, kind="AutoModelForSequenceClassification", **changes):
    settings = transformers.AutoConfig.for_model(family, **{**SIZES, **OWN.get(family, {}), **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(transformers, kind).from_config(settings).save_pretrained(folder)
    tokenizer(types).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("typed")
    return {family: save(root / family, family) for family in (*TYPED, "roberta")}


@pytest.fixture(scope="module")
def typed(folders):
    return folders["bert"]


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)
    return [
        {
            "a": " ".join(rng.choice(WORDS, rng.integers(1, 6))),
            "b": " ".join(rng.choice(WORDS, rng.integers(1, 4))),
            "label": i % 3,
            "user": f"u{i % 3}",
        }
        for i in range(36)
    ]


def written(folder, rows, kind):
    path = folder / f"pairs.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            out = csv.DictWriter(file, rows[0].keys(), delimiter="\t" if kind == "tsv" else ",")
            out.writeheader()
            out.writerows(rows)
    return path


COLUMNS = {"text": "a", "text_pair": "b", "label": "label", "client": "user"}


def experiment(model, root, cache, tuning=None, columns=COLUMNS, **more):
    kind = root.suffix.removeprefix(".")
    return rayfed.Experiment(
        method="fedavg",
        model=f"hf/{model}",
        tuning=tuning or rayfed.LoRA(rank=2),
        rounds=1,
        cluster="inline",
        data={
            "name": "hf/pairs" if kind == "parquet" and more.pop("hub", False) else kind,
            "root": str(root),
            "cache": str(cache),
            "test": 0.34,
            "val": 0,
            "columns": columns,
            **({"partition": {"min_samples": 1}} if "client" in (columns or {}) else {}),
        },
        **more,
    )


def test_networks_get_the_types_of_tokens(folders, pairs, tmp_path):
    """The loss of a run is that of its adapter in the library, with the library's own input."""
    routes = dict(zip(TYPED, ["jsonl", "csv", "parquet", "tsv"] * 2, strict=True))
    for family in ("bert", "deberta-v2", "gpt2"):
        path = written(tmp_path, pairs, routes[family])
        run = experiment(folders[family], path, tmp_path, train={"lr": 0.01}).run(quiet=True)
        adapter = run.adapter(tmp_path / family)
        labels = json.loads((adapter / "labels.json").read_text())
        assert labels["label2id"] == {"0": 0, "1": 1, "2": 2}
        base = transformers.AutoModelForSequenceClassification.from_pretrained(
            folders[family], **labels, ignore_mismatched_sizes=True, dtype=torch.float32
        )
        other = PeftModel.from_pretrained(base, adapter).eval()
        made = transformers.AutoTokenizer.from_pretrained(folders[family])
        table = pq.read_table(run._folder / "partition.parquet").to_pandas()
        losses, own = [], run.model()
        for index, label in table[table.split == "test"][["index", "label"]].itertuples(index=False):
            row = made(pairs[index]["a"], pairs[index]["b"], return_tensors="pt")
            assert "token_type_ids" in row
            with torch.no_grad():
                logits = other(**row).logits
                near(own(**row), logits, 3000, float(logits.abs().max()))
                near(own(row), logits, 3000, float(logits.abs().max()))
            losses.append(float(nn.functional.cross_entropy(logits, torch.tensor([int(label)]))))
        domains = [len(part) for _, part in table[table.split == "test"].groupby("client")]
        if len({*domains}) == 1:  # the run's loss is a mean over clients
            near(run.loss, np.mean(losses), 3000)


@pytest.mark.parametrize("family", TYPED)
def test_logits_of_pairs_are_those_of_the_library(folders, pairs, tmp_path, family):
    """In a padded batch, as training and scoring read it; without types they would be others."""
    setup = prepared(experiment(folders[family], written(tmp_path, pairs, "jsonl"), tmp_path).config())
    model = setup.context.build().eval()
    images = setup.dataset.images
    rows = np.arange(5)
    x = torch.from_numpy(images[rows]).long()
    whole = vars(model.net)["whole"]
    text_checks._give(model.head, whole, 3)
    made = transformers.AutoTokenizer.from_pretrained(folders[family])
    with torch.no_grad():
        ours, untyped = model(x), model(torch.where(x < 0, x, x & (1 << TYPE_BITS) - 1))
        for row, logits in zip(rows, ours, strict=True):
            named = made(pairs[row]["a"], pairs[row]["b"], return_tensors="pt")
            expected = whole.eval()(**named).logits
            near(logits[None], expected, 300, max(1.0, float(expected.abs().max())))
            assert float((model.net.named(x[[row]])["input_ids"] - named["input_ids"][0, 0]).abs().min()) == 0
    assert float((ours - untyped).abs().max()) > 1e-3


@pytest.mark.parametrize("family", ["bert", "deberta"])
def test_groups_get_the_types_of_tokens(folders, pairs, tmp_path, family):
    check_agreement(pairs_of(family, folders, pairs, tmp_path))


def pairs_of(family, folders, pairs, tmp_path):
    """An experiment of several clients with pairs of texts."""
    root = written(tmp_path, pairs, "jsonl")
    columns = "{text: a, text_pair: b, label: label, client: user}"
    options = ["data=jsonl", f"data.root={root}", f"data.columns={columns}", f"data.cache={tmp_path}"]
    options += [
        f"model=hf/{folders[family]}",
        "algorithm=fedavg",
        "tuning=lora",
        "rounds=2",
        "cluster=inline",
    ]
    options += ["data.partition.scheme=natural", "data.partition.min_samples=1", "train.batch_size=3"]
    return prepared(load_config(options))


def test_of_single_texts_nothing_is_stored(folders, pairs, tmp_path):
    columns = {key: value for key, value in COLUMNS.items() if key != "text_pair"}
    path = written(tmp_path, pairs, "jsonl")
    setup = prepared(experiment(folders["bert"], path, tmp_path, columns=columns).config())
    assert setup.dataset.images.tokens.max() < KNOWN
    both = prepared(experiment(folders["bert"], path, tmp_path).config())
    assert both.dataset.images.tokens.max() >> TYPE_BITS == 1


@pytest.mark.slow
def test_a_real_network_reads_pairs_as_the_library_does(shared, tmp_path):
    folder = shared / "weights" / "minilm_l6"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder} with real weights")
    rows = [
        {"a": "A man plays a guitar.", "b": "Somebody makes music.", "label": i % 2, "user": f"u{i % 2}"}
        for i in range(12)
    ]
    setup = prepared(experiment(folder, written(tmp_path, rows, "jsonl"), tmp_path).config())
    model = setup.context.build()
    model.eval()
    other = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    named = transformers.AutoTokenizer.from_pretrained(folder)(
        rows[0]["a"], rows[0]["b"], return_tensors="pt"
    )
    with torch.no_grad():
        ours = model.net(torch.from_numpy(setup.dataset.images[np.arange(1)]).long())
        expected = other(**named).pooler_output
        untyped = other(input_ids=named["input_ids"]).pooler_output
    near(ours, expected, 300, 1.0)
    assert float((ours - untyped).abs().max()) > 1e-3


def test_pads_before_tokens_are_refused(folders, pairs, tmp_path):
    run = experiment(folders["bert"], written(tmp_path, pairs, "jsonl"), tmp_path).run(quiet=True)
    made = transformers.AutoTokenizer.from_pretrained(folders["bert"])
    texts = [["w1 w2", "w3"], ["w1", "w2 w3 w4 w5"]]
    right = made(*zip(*texts, strict=True), padding=True, return_tensors="pt")
    alone = [run.model()(**made(*pair, return_tensors="pt")) for pair in texts]
    near(run.model()(right), torch.cat(alone), 3000, 10.0)
    made.padding_side = "left"
    with pytest.raises(ValueError, match="padding_side"):
        run.model()(**made(*zip(*texts, strict=True), padding=True, return_tensors="pt"))


@pytest.mark.parametrize("task", ["classify", "pair", "write", "conversation"])
@pytest.mark.parametrize("rows", [KNOWN, KNOWN + 1, KNOWN + 9])
def test_a_token_beyond_the_embedding_is_named(tmp_path, task, rows):
    """The tokenizer has one token more than the words; an embedding may have rows that no token has."""
    language_model = task in ("write", "conversation")
    kind = "AutoModelForCausalLM" if language_model else "AutoModelForSequenceClassification"
    folder = save(tmp_path / "m", "llama" if language_model else "bert", kind=kind, vocab_size=rows)
    made = tokenizer()
    made.add_tokens(["<new>"])
    made.save_pretrained(folder)
    text = {
        "classify": {"text": "w1 <new>"},
        "pair": {"text": "w1", "b": "<new>"},
        "write": {"prompt": "w1", "completion": "<new>"},
        "conversation": {
            "messages": [{"role": "user", "content": "<new>"}, {"role": "assistant", "content": "w1"}]
        },
    }[task]
    table = [{**text, **({} if language_model else {"label": i % 2})} for i in range(24)]
    columns = {"text": "text", "text_pair": "b", "label": "label"} if task == "pair" else None
    build = experiment(folder, written(tmp_path, table, "jsonl"), tmp_path, columns=columns)
    if rows > KNOWN:
        prepared(build.config())
        return
    with pytest.raises(ConfigError, match=rf"token {KNOWN} \('<new>'\).* has {KNOWN} rows for a token"):
        build.run(quiet=True)


def test_a_token_that_no_text_has_does_no_harm(tmp_path, pairs):
    folder = save(tmp_path / "m", "bert")
    made = tokenizer()
    made.add_tokens(["<new>"])
    made.save_pretrained(folder)
    prepared(experiment(folder, written(tmp_path, pairs, "jsonl"), tmp_path).config())


def test_a_type_beyond_the_embedding_is_named(folders, pairs, tmp_path):
    """RoBERTa has one row for types, and its own tokenizer returns none."""
    with pytest.raises(ConfigError, match=r"type 1, of token .* has 1 rows for a type"):
        experiment(folders["roberta"], written(tmp_path, pairs, "jsonl"), tmp_path).run(quiet=True)
    folder = save(tmp_path / "own", "roberta", types=False)
    prepared(experiment(folder, written(tmp_path, pairs, "jsonl"), tmp_path).config())


OF_FALCON = {
    "lm_head_multiplier": 0.3,
    "mamba_d_ssm": 16,
    "mamba_n_heads": 2,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "num_key_value_heads": 2,
}
SCALED = {
    "falcon_h1": OF_FALCON,
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("family", SCALED)
def test_a_head_whose_output_is_changed_is_refused(tmp_path, monkeypatch, family, known):
    """By the name of the setting, or, where that is not known, by the logits of a text of the user."""
    folder = save(tmp_path / "m", family, types=False, kind="AutoModelForCausalLM", **SCALED[family])
    rows = [{"prompt": "w1 w2", "completion": f"w{i} w3"} for i in range(24)]
    if not known:
        monkeypatch.setattr(language, "SCALED", ())
    words = "changes the output of its head" if known else "would not give the logits of the library"
    with pytest.raises(ConfigError, match=words):
        experiment(folder, written(tmp_path, rows, "jsonl"), tmp_path, columns=None).run(quiet=True)


def test_a_setting_that_changes_nothing_is_taken(tmp_path):
    changes = {**OF_FALCON, "lm_head_multiplier": 1.0}
    folder = save(tmp_path / "m", "falcon_h1", types=False, kind="AutoModelForCausalLM", **changes)
    rows = [{"prompt": "w1 w2", "completion": f"w{i} w3"} for i in range(24)]
    prepared(experiment(folder, written(tmp_path, rows, "jsonl"), tmp_path, columns=None).config())


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("ibert", "would not give the logits of the library|is not supported"),
        ("nystromformer", "would not give the logits of the library"),
        ("big_bird", "is not supported|cannot"),
        ("squeezebert", "is not supported|cannot"),
        ("xlnet", "no classifier of a known kind"),
        ("albert", "has no list of its 2 layers"),
    ],
)
def test_a_network_that_is_not_the_library_s_is_refused(tmp_path, pairs, family, words):
    changes = {
        "squeezebert": {"embedding_size": 16},
        "albert": {"embedding_size": 8},
        "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    }.get(family, {})
    own = {key: value for key, value in SIZES.items() if family != "xlnet" or key == "vocab_size"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = transformers.AutoConfig.for_model(family, **{**own, **changes})
        transformers.AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigError, match=words) as caught:
        experiment(tmp_path / "m", written(tmp_path, pairs, "jsonl"), tmp_path, tuning="full").run(quiet=True)
    assert "\n" not in str(caught.value)


def test_a_run_without_an_adapter_says_why(folders, pairs, tmp_path):
    build = experiment(folders["bert"], written(tmp_path, pairs, "jsonl"), tmp_path)
    run = build.changed(method="fedsa_lora").run(quiet=True)
    with pytest.raises(ConfigError, match=r"factors stay at the clients; run\.params has all"):
        run.adapter(tmp_path / "adapter")


WORDY = st.lists(st.sampled_from([*WORDS, "unknown"]), min_size=1, max_size=9).map(" ".join)


@settings(max_examples=15, deadline=None)
@given(
    text=WORDY,
    pair=st.one_of(st.none(), WORDY),
    size=st.integers(4, 20),
    side=st.sampled_from(["left", "right"]),
)
def test_pairs_have_the_tokens_and_types_of_the_tokenizer(typed, text, pair, size, side):
    """Whatever is cut."""
    made = transformers.AutoTokenizer.from_pretrained(typed, truncation_side=side)
    source = Tokenized(
        source=Texts([Text(text=text, pair=pair)], "text_classification"), tokenizer=str(typed), truncate=side
    )
    found = source.decode(source.scan(), 0, size).ids
    expected = made(text, pair, truncation=True, max_length=size)
    assert (found & (1 << TYPE_BITS) - 1).tolist() == expected["input_ids"]
    assert (found >> TYPE_BITS).tolist() == expected["token_type_ids"]


@pytest.mark.numeric
def test_on_a_device_groups_get_the_types_of_tokens(folders, pairs, tmp_path):
    agree(pairs_of("bert", folders, pairs, tmp_path))
