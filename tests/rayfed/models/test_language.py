"""Models of transformers as backbones give what the library gives, whatever stands behind the texts."""

import pytest
import torch
import transformers
from huggingface_hub import constants

from rayfed.data.text import PAD
from rayfed.data.tokenizer import ANSWER_SECONDS
from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.language import settings_of
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import attach, dump, skeleton
from rayfed.models.trunk import use_checkpointing
from rayfed.objective import IGNORED, LANGUAGE_MODELING, TEXT_CLASSIFICATION, LanguageModeling
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.lora import Lora
from tests.rounding import near
from tests.tiny_models import CONFIGS, DECODERS, save

ROUNDINGS = 2000
"""Operations on the way from tokens to a logit of a tiny model, each rounded once."""

ROWS = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17], [20, 21]]


def batch(rows, length):
    return torch.tensor([[*row, *[PAD] * (length - len(row))] for row in rows])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    named = {family: save(family, root / family) for family in CONFIGS}
    return named | {f"{family} lm": save(family, root / f"{family}-lm", language=True) for family in DECODERS}


def model_of(name, task=TEXT_CLASSIFICATION, classes=4, **options):
    return build_backbone(ModelConfig(name=name, **options), classes, 0, task).eval()


def theirs(name, kind="AutoModelForSequenceClassification", **options):
    return (
        getattr(transformers, kind)
        .from_pretrained(name.removeprefix("hf/"), dtype=torch.float32, **options)
        .eval()
    )


def with_head_of(model, other, plan):
    """The classifier of the library with the values of ours."""
    last = other.get_submodule(plan.last)
    pairs = [(last, model.head)]
    if plan.hidden:
        pairs.append((other.get_submodule(plan.hidden), model.head.dense))
    with torch.no_grad():
        for theirs_, ours in pairs:
            theirs_.weight.copy_(ours.weight)
            if ours.bias is not None:
                theirs_.bias.copy_(ours.bias)
    return other


@pytest.mark.parametrize("family", CONFIGS)
def test_a_classifier_gives_the_logits_of_the_library(folders, family):
    model = model_of(folders[family])
    other = with_head_of(
        model,
        theirs(
            folders[family],
            num_labels=4,
            ignore_mismatched_sizes=True,
            pad_token_id=0 if family != "roberta" else 1,
        ),
        model.head.plan,
    )
    for row in ROWS:
        with torch.no_grad():
            expected = other(input_ids=torch.tensor([row]), attention_mask=torch.ones(1, len(row))).logits
            near(model(torch.tensor([row])), expected, ROUNDINGS)
            padded = model(batch(ROWS, 8))[ROWS.index(row)][None]
        near(padded, expected, ROUNDINGS)


@pytest.mark.parametrize("family", DECODERS)
def test_a_language_model_has_the_loss_of_the_library(folders, family):
    name = folders[f"{family} lm"]
    model, other = model_of(name, LANGUAGE_MODELING), theirs(name, "AutoModelForCausalLM")
    ids = torch.tensor([ROWS[1], [*ROWS[0], 9, 8, 7]])
    labels = ids.clone()
    labels[:, :3] = -100
    labels[1, 6:] = -100
    with torch.no_grad():
        expected = other(input_ids=ids, labels=labels)
        found = model(ids)
    near(found, expected.logits, ROUNDINGS)
    y = torch.full_like(ids, IGNORED)
    y[:, :-1] = labels[:, 1:]
    near(LanguageModeling().loss(found, y), expected.loss, ROUNDINGS)


@pytest.mark.parametrize("family", DECODERS)
def test_a_token_that_stands_for_pads_counts_where_it_is_in_a_text(folders, family):
    model = model_of(folders[family])
    text = [5, 6, model.net.pad]
    with torch.no_grad():
        alone, padded = model(torch.tensor([text])), model(batch([text], 8))
        near(padded, alone, ROUNDINGS)
        assert not torch.allclose(alone, model(torch.tensor([text[:2]])))


@pytest.mark.parametrize("family", DECODERS)
def test_pads_change_no_logit_of_a_language_model(folders, family):
    model = model_of(folders[f"{family} lm"], LANGUAGE_MODELING)
    with torch.no_grad():
        for row, found in zip(ROWS, model(batch(ROWS, 16)), strict=True):
            near(found[: len(row)], model(torch.tensor([row]))[0], ROUNDINGS)


@pytest.mark.parametrize("family", CONFIGS)
def test_attached_to_the_weights_it_is_the_same_model(folders, family):
    model = model_of(folders[family])
    model.requires_grad_(False)

    def bare():
        made = build_backbone(ModelConfig(name=folders[family]), 4, 0, TEXT_CLASSIFICATION)
        return made.requires_grad_(False)

    empty = skeleton(bare)
    assert all(value.is_meta for value in empty.parameters())
    attach(empty, dump(model))
    assert torch.equal(empty.eval()(batch(ROWS, 8)), model(batch(ROWS, 8)))


@pytest.mark.parametrize("family", CONFIGS)
def test_blocks_can_be_left_out(folders, family):
    model, fewer = model_of(folders[family]), model_of(folders[family])
    fewer.active = (1,)
    fewer.net.blocks.get_submodule("0").register_forward_hook(lambda *_: pytest.fail("block 0 ran"))
    found = fewer(batch(ROWS, 8))
    assert not torch.equal(found, model(batch(ROWS, 8)))
    names = [name for name in model.tensors() if name.startswith("blocks.")]
    assert {name.split(".")[1] for name in names} == {"0", "1"}


def test_of_tied_weights_there_is_one_name(folders):
    model = model_of(folders["gpt2 lm"], LANGUAGE_MODELING)
    assert model.head.weight is model.net.trunk.wte.weight
    assert "head.weight" not in model.tensors()
    apart = model_of(folders["llama lm"], LANGUAGE_MODELING)
    assert "head.weight" in apart.tensors()


@pytest.mark.parametrize("name", ["gpt2 lm", "llama lm", "qwen2 lm"])
def test_schemes_leave_the_head_of_a_language_model_alone(folders, name):
    model = apply_tuning(model_of(folders[name], LANGUAGE_MODELING), Lora(rank=2), 0)
    assert all(".lora_" in tensor for tensor in trainable(model))


def test_checkpointing_with_frozen_embeddings_gives_the_same_gradients(folders):
    def gradients(forget):
        model = apply_tuning(model_of(folders["qwen2 lm"], LANGUAGE_MODELING), Lora(rank=2, dropout=0.0), 0)
        if forget:
            use_checkpointing(model)
        model.train()
        model(batch(ROWS, 8)).square().sum().backward()
        return [p.grad for p in trainable(model).values()]

    for own, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("family", "sites", "layers"),
    [
        ("bert", ("query_value",), {"attention.self.query", "attention.self.value"}),
        ("gpt2", ("query_value",), {"attn.c_attn"}),
        ("llama", ("query_value",), {"self_attn.q_proj", "self_attn.v_proj"}),
        ("distilbert", ("l0", "l1"), {"attention.out_lin", "ffn.lin2"}),
        ("gpt2", ("all_linear",), {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        ("roberta", ("l0", "l1"), {"attention.output.dense", "output.dense"}),
    ],
)
def test_sites_by_name(folders, family, sites, layers):
    model = apply_tuning(model_of(folders[family]), Lora(rank=2, sites=sites), 0)
    names = {name.split(".", 2)[2].rpartition(".")[0] for name in trainable(model) if ".lora_A" in name}
    assert names == layers


def test_weights_stored_in_half_precision_are_read_as_float32(tmp_path):
    save("llama", tmp_path, language=True)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    model = model_of(f"hf/{tmp_path}", LANGUAGE_MODELING)
    assert {value.dtype for value in model.parameters()} == {torch.float32}


def test_what_is_not_supported_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="no decoder"):
        model_of(folders["bert"], LANGUAGE_MODELING)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        model_of(f"hf/{tmp_path}")
    with pytest.raises(ConfigError, match=r"model\.size: 1000 is more than the 64 tokens"):
        model_of(folders["bert"], size=1000)
    with pytest.raises(ConfigError, match="reads texts"):
        model_of(folders["bert"], "classification")


@pytest.mark.parametrize("reachable", [True, False])
def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, reachable):
    """Otherwise the library tries again for half a minute. A folder needs no hub, and asks none."""
    asked, offline = [], []

    class Hub:
        def head(self, url, timeout):
            asked.append(timeout)
            if not reachable:
                raise OSError("Name or service not known")

    def load(name, **_):
        offline.append(constants.HF_HUB_OFFLINE)
        raise OSError("couldn't connect")

    monkeypatch.setattr("huggingface_hub.get_session", Hub)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", load)
    for name in ("hf/some/model", "hf//some/folder"):
        with pytest.raises(
            ConfigError, match=r"the hub does not answer|the folder /some/folder does not exist"
        ):
            settings_of(ModelConfig(name=name))
    assert asked == [ANSWER_SECONDS]
    assert offline == [not reachable, False]
    assert not constants.HF_HUB_OFFLINE
