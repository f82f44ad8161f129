"""Texts in one row give what padded texts give, for every family, objective and tuning scheme."""

from copy import deepcopy
from importlib import import_module

import numpy as np
import pytest
import torch

from rayfed.data.text import PAD, Inputs, Targets
from rayfed.engine import session
from rayfed.engine.loop import run_rounds
from rayfed.engine.session import PADDED
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.fast.packed_texts import Layout, PackedTextNet, use_packed_texts, why_padded
from rayfed.federation.params import digest
from rayfed.federation.passes import PLAIN
from rayfed.federation.train_config import TrainConfig
from rayfed.models.build import build_backbone
from rayfed.models.language import TextNet
from rayfed.models.model_config import ModelConfig
from rayfed.objective import (
    IGNORED,
    LANGUAGE_MODELING,
    TEXT_CLASSIFICATION,
    TEXT_REGRESSION,
    LanguageModeling,
    TextClassification,
    TextRegression,
)
from rayfed.tuning.base import apply_tuning
from tests.conftest import quickly
from tests.pretended import pretended
from tests.rayfed.engine.test_text_checks import save as save_typed
from tests.rayfed.engine.test_texts import folder, rounds_of, settings, setup_of  # noqa: F401  (a fixture)
from tests.rayfed.fast.test_group import check_agreement, played
from tests.rounding import equally_near, exact_numbers, exactly_trained, near
from tests.tiny_models import CONFIGS, DECODERS, WORDS, save

SIZE = 48
"""Most tokens of a text."""

LENGTHS = (SIZE, 1, 13, 2, SIZE, 7, 30, 1, 21)
"""Texts of very unequal lengths, among them such of one token and of the most that a model takes."""

TUNINGS = {
    "lora": {"rank": 2, "dropout": 0.0},
    "full": {},
    "head": {},
    "bitfit": {},
    "adapter": {},
    "ia3": {},
    "ssf": {},
    "exits": {"inner": {"name": "lora", "rank": 2, "dropout": 0.0}, "every": 1},
}
STILL = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"),
    *("embd_pdrop", "attn_pdrop", "resid_pdrop", "seq_classif_dropout", "classifier_dropout"),
)
"""Settings of the library with the rate of a dropout."""


def texts(lengths=LENGTHS, size=SIZE):
    tokens = np.random.default_rng(0).integers(0, WORDS, sum(lengths)).astype(np.int32)
    return Inputs(tokens, np.cumsum([0, *lengths]), size)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each family without dropout, whose positions and tokens count for much."""
    root = tmp_path_factory.mktemp("packed")
    found = {}
    for family in CONFIGS:
        still = {name: 0.0 for name in STILL if getattr(CONFIGS[family](), name, None)}
        still |= {"initializer_range": 0.3}
        found[family] = save(family, root / family, **still)
        if family in DECODERS:
            found[f"{family} lm"] = save(family, root / f"{family}-lm", language=True, **still)
    return found


def model_of(folders, family, task=TEXT_CLASSIFICATION, tuning="lora"):
    """A tuned model, all of whose trained tensors are away from their start values."""
    name = folders[f"{family} lm" if task == LANGUAGE_MODELING else family]
    model = build_backbone(ModelConfig(name=name, size=SIZE), 1 if task == TEXT_REGRESSION else 4, 0, task)
    scheme = import_module(f"rayfed.tuning.{tuning}").TUNING(**TUNINGS[tuning])
    model = apply_tuning(model, scheme, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for entry in model.tensors().values():
            if entry.is_trained:
                entry.tensor.add_(0.1 * torch.randn(entry.tensor.shape, generator=generator))
    return model


def batch(task, answers=False):
    """A padded batch, its targets and their objective."""
    inputs = texts()
    rows = np.arange(len(LENGTHS))
    x = torch.from_numpy(inputs[rows]).long()
    if task == TEXT_CLASSIFICATION:
        return x, torch.arange(len(x)) % 4, TextClassification()
    if task == TEXT_REGRESSION:
        return x, torch.linspace(-1, 1, len(x)), TextRegression()
    learned = np.ones(len(inputs.tokens), np.uint8)
    if answers:
        for start, end in zip(inputs.starts, inputs.starts[1:], strict=False):
            learned[start : (start + end + 1) // 2] = 0
    return x, torch.from_numpy(Targets(inputs, learned)[rows]), LanguageModeling()


def step(model, x, y, objective):
    """The loss of a batch and the gradient of every trained tensor."""
    model.train()
    model.zero_grad()
    loss = PLAIN.loss(model, objective, (x.clone(), y))
    loss.backward()
    grads = {n: e.tensor.grad for n, e in model.tensors().items() if e.tensor.grad is not None}
    assert grads
    return {"loss": loss.detach(), **grads}


def packed(model):
    """A copy that computes texts in one row."""
    model = deepcopy(model)
    use_packed_texts(model)
    return model


GOALS = {
    "classes": (TEXT_CLASSIFICATION, False),
    "numbers": (TEXT_REGRESSION, False),
    "next token": (LANGUAGE_MODELING, False),
    "answers": (LANGUAGE_MODELING, True),
}
CASES = [
    (family, goal, tuning)
    for family in CONFIGS
    for goal, (task, _) in GOALS.items()
    for tuning in TUNINGS
    if (task != LANGUAGE_MODELING or (family in DECODERS and tuning != "head"))
    and (family, tuning) != ("llama", "bitfit")  # it has no bias
]


@pytest.mark.numeric
@pytest.mark.parametrize(("family", "goal", "tuning"), CASES)
def test_gradients_are_those_of_padded_texts(folders, family, goal, tuning):
    task, answers = GOALS[goal]
    model = model_of(folders, family, task, tuning)
    x, y, objective = batch(task, answers)
    without = packed(model)
    found = step(without, x, y, objective)
    if without.net_is_frozen:
        assert isinstance(without.net, PackedTextNet)
    else:
        assert without.net._layout.passes == 2
    with exact_numbers():
        wanted = step(deepcopy(model).double(), x, y.double() if y.is_floating_point() else y, objective)
    equally_near(step(model, x, y, objective), found, wanted)


@pytest.mark.numeric
@pytest.mark.parametrize("family", CONFIGS)
def test_scores_are_those_of_padded_texts(folders, family):
    task = LANGUAGE_MODELING if family in DECODERS else TEXT_CLASSIFICATION
    x, y, objective = batch(task)
    padded = model_of(folders, family, task).eval()
    without, exact = packed(padded).eval(), deepcopy(padded).double().eval()
    with torch.no_grad():
        sums = [objective.sums(model(x.clone()), y) for model in (padded, without)]
        with exact_numbers():
            sums.append(objective.sums(exact(x.clone()), y))
    equally_near(*({"loss": own["loss"]} for own in sums))
    assert sums[0][objective.metric] == sums[1][objective.metric]


def test_attention_is_computed_for_few_texts_at_once():
    layout = Layout(batch(TEXT_CLASSIFICATION)[0] != PAD)
    assert layout.parts == [64, 86, 21]
    assert layout.starts.tolist() == [0, 48, 49, 62, 64, 112, 119, 149, 150]
    assert layout.ends.tolist() == [47, 48, 61, 63, 111, 118, 148, 149, 170]
    assert len(layout.places) == sum(LENGTHS)
    assert layout.tokens_of([3, 2, 4]) == [62, 50, 59]
    assert layout.tokens_of([]) == []
    first, second, last = layout.masks(False)
    assert first[0, 0].sum() == 48**2 + 1 + 13**2 + 2**2
    assert second[0, 0].sum() == 48**2 + 7**2 + 30**2 + 1
    assert last is None
    causal = layout.masks(True)[0]
    assert torch.equal(causal, first.tril())


def test_a_batch_with_an_empty_text_is_padded(folders):
    model = model_of(folders, "bert").eval()
    x = batch(TEXT_CLASSIFICATION)[0]
    x[3] = PAD
    without = packed(model)
    with torch.no_grad():
        assert torch.equal(model(x), without(x.clone()))
    assert without.net._layout is None


def test_the_longest_text_may_have_all_positions(folders):
    """The row is longer than the network has positions."""
    assert sum(LENGTHS) > 66
    for family in CONFIGS:
        assert why_padded(model_of(folders, family).eval(), texts(), TrainConfig()) == ""


OF_ITS_OWN = "its attention is not that of torch"
OTHERS = {"electra": "", "ernie": "", "deberta-v2": OF_ITS_OWN, "roformer": OF_ITS_OWN}


@pytest.mark.parametrize("family", [*OTHERS, "mistral"])
def test_a_network_is_packed_only_where_that_gives_the_same(tmp_path, family):
    more = {"sliding_window": 8, "num_key_value_heads": 1} if family == "mistral" else {}
    name = f"hf/{save_typed(tmp_path / family, family, **more)}"
    model = build_backbone(ModelConfig(name=name, size=SIZE), 4, 0, TEXT_CLASSIFICATION)
    model = apply_tuning(model, import_module("rayfed.tuning.lora").TUNING(rank=2), 0).eval()
    inputs = Inputs(texts().tokens % 40, texts().starts, SIZE)
    why = why_padded(model, inputs, TrainConfig())
    assert type(model.net) is TextNet
    wanted = OTHERS.get(family, "its tokens see 8 others, and texts have up to 48 (model.size)")
    assert wanted in why
    assert bool(why) == bool(wanted)


@pytest.mark.parametrize("rule", ["_positions", "pooled"])
def test_a_network_that_differs_is_found_before_the_run(folders, monkeypatch, rule):
    broken = {
        "_positions": lambda net, ids: torch.zeros_like(ids),
        "pooled": lambda net, hidden: hidden[0].flip(0)[net._layout.starts],
    }
    monkeypatch.setattr(PackedTextNet, rule, broken[rule])
    for family in ("distilbert", "gpt2"):
        assert "features without pads differ by" in why_padded(
            model_of(folders, family).eval(), texts(), TrainConfig()
        )


def test_the_header_says_why_texts_are_padded(folder, cache):  # noqa: F811
    setup = setup_of(folder, cache, "bert")
    assert setup.context.train.pack_texts is True
    assert not any("padded" in note for note in setup.notes)
    setup = setup_of(folder, cache, "bert", "train.checkpointing=true")
    assert setup.context.train.pack_texts is False
    [note] = [note for note in setup.notes if "padded" in note]
    assert note == (
        "batches of texts are padded (train.pack_texts), because train.checkpointing runs the network in "
        "another way"
    )
    with pytest.raises(ConfigError, match=r"train\.pack_texts: true cannot be used here, because train\.ch"):
        setup_of(folder, cache, "bert", "train.checkpointing=true", "train.pack_texts=true")
    setup = setup_of(folder, cache, "bert", "algorithm=feddpa")
    assert [note for note in setup.notes if "tuning.personal" in note]
    setup = setup_of(folder, cache, "bert", "train.pack_texts=false")
    assert setup.context.train.pack_texts is False
    assert not any("padded" in note for note in setup.notes)


@pytest.mark.numeric
@pytest.mark.parametrize(
    "case",
    quickly(
        ["roberta", "distilbert tuning=bitfit", "gpt2-lm", "qwen2 tuning=ia3", "llama-lm algorithm=scaffold"],
        ["roberta", "gpt2-lm"],
    ),
)
def test_a_run_is_that_of_padded_texts(folder, cache, case):  # noqa: F811
    model, *overrides = case.split()
    still = ("tuning.dropout=0",) if not any("tuning=" in text for text in overrides) else ()
    without = setup_of(folder, cache, model, *overrides, *still)
    assert without.context.train.pack_texts is True
    padded = setup_of(folder, cache, model, *overrides, *still, "train.pack_texts=false")
    one, other = (rounds_of(setup)[-1] for setup in (padded, without))
    equally_near(one.state.params, other.state.params, exactly_trained(padded))


@pytest.mark.numeric
@pytest.mark.parametrize(
    "case", quickly(["bert", "roberta tuning=bitfit", "gpt2 tuning=ssf", "qwen2-lm tuning=ia3"], ["bert"])
)
def test_groups_in_one_row_agree_with_single_clients(folder, cache, case, monkeypatch):  # noqa: F811
    """Also with dropout, of which each client draws what it draws alone, and with unequal last batches."""
    model, *overrides = case.split()
    setup = setup_of(folder, cache, model, "train.batch_size=4", *overrides)
    shared = []
    before = Layout.tokens_of

    def tokens_of(layout, sizes):
        shared.append([*sizes])
        return before(layout, sizes)

    monkeypatch.setattr(Layout, "tokens_of", tokens_of)
    check_agreement(setup)
    assert any(len(sizes) == 3 for sizes in shared)


def test_a_group_computes_no_token_twice(folder, cache, monkeypatch):  # noqa: F811
    """Neither pads nor the rows that fill the places of clients with smaller batches."""
    setup = setup_of(folder, cache, "bert", "train.batch_size=4", "data.test=0.3")
    counted = []
    before = Layout.__init__

    def count(layout, there, repeated=None):
        before(layout, there, repeated)
        counted.append(len(layout.places))

    monkeypatch.setattr(Layout, "__init__", count)
    played(setup, 1)
    alone = sum(counted)
    counted.clear()
    executor, _ = played(setup, 4)
    assert executor.together == 4
    assert sum(counted) == alone


@pytest.mark.ray
@pytest.mark.parametrize("model", quickly(["bert", "llama-lm"], ["bert"]))
@pytest.mark.parametrize("group", quickly([1, 3], [1]))
def test_where_clients_run_changes_no_bit(folder, cache, model, group, pool_of_two):  # noqa: F811
    setup = setup_of(folder, cache, model, f"train.group={group}")
    assert setup.context.train.pack_texts is True
    alone = rounds_of(setup)[-1]
    *_, together = run_rounds(setup.experiment, pool_of_two(setup), setup.start)
    assert digest(together.state.params) == digest(alone.state.params)


def test_without_dropout_only_rounding_differs_and_with_it_draws_do(folders):
    """No number is drawn for a pad, so that the masks of a row are not those of padded texts."""
    x, y, objective = batch(TEXT_CLASSIFICATION)
    model = model_of(folders, "bert")
    for module in model.net.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = torch.nn.Dropout(0.5)
    model.refresh()
    found = []
    for own in (model, packed(model)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(step(own, x, y, objective)["loss"])
    assert abs(found[0] - found[1]) > 1e-4


def test_the_head_of_a_language_model_reads_no_pads(folders, monkeypatch):
    """And only those features that its own network made of the batch."""
    x = batch(LANGUAGE_MODELING)[0]
    model = packed(model_of(folders, "gpt2", LANGUAGE_MODELING)).eval()
    seen = []
    linear = torch.nn.functional.linear

    def counted(rows, weight, bias=None):
        if len(weight) == WORDS:
            seen.append(rows.shape[:-1].numel())
        return linear(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    with torch.no_grad():
        logits = model(x)
        whole = model.classify(model.features(x).clone())
        features = model.features(x)
        model.features(x.flip(0))
        again = model.classify(features)
    assert seen == [sum(LENGTHS), x.numel(), x.numel()]
    assert not logits[x == PAD].any()
    assert torch.equal(whole, again)
    near(logits[x != PAD], whole[x != PAD], 2000)


def test_a_device_pads_and_the_run_says_so(folder, cache, tmp_path, monkeypatch):  # noqa: F811
    setup = setup_of(folder, cache, "bert", "rounds=1")
    with pretended() as device:
        net = InlineExecutor(setup.context, setup.weights, device=device.name).worker.model.net
        assert type(net) is TextNet
        for name, expected in ((device.name, [PADDED]), ("cpu", [])):
            found = torch.device(name), ""
            monkeypatch.setattr(session, "inline_device", lambda *_, found=found: found)
            said = []
            (tmp_path / name / "model").mkdir(parents=True)
            with session.launch(setup, tmp_path / name, said.append):
                assert said == expected


def test_a_worker_packs_only_what_was_tried(folder, cache):  # noqa: F811
    setup = setup_of(folder, cache, "bert")
    assert isinstance(InlineExecutor(setup.context, setup.weights).worker.model.net, PackedTextNet)
    setup = setup_of(folder, cache, "bert", "train.pack_texts=false")
    assert type(InlineExecutor(setup.context, setup.weights).worker.model.net) is TextNet


def test_unlearned_tokens_have_no_share(folders):
    """A loss over answers alone is that of the tokens of answers, however long the texts are."""
    x, y, objective = batch(LANGUAGE_MODELING, answers=True)
    model = packed(model_of(folders, "gpt2", LANGUAGE_MODELING)).eval()
    with torch.no_grad():
        whole = objective.loss(model(x), y)
        each = [
            objective.sums(model(x[i : i + 1, :length]), y[i : i + 1, :length])
            for i, length in enumerate(LENGTHS)
        ]
    learned = sum(float(own["num"]) for own in each)
    assert learned == int((y != IGNORED).sum())
    near(float(whole), sum(float(own["loss"]) for own in each) / learned, 2000)
