"""CLIP backbones: open_clip's own outputs, class prompts, tunings, sharing, errors."""

from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from benchmarks.glyph_pool import Captioner
from rayfed.errors import ConfigError
from rayfed.models import clip, networks
from rayfed.models.build import build_backbone
from rayfed.models.captions import CONTEXT, VOCABULARY, class_names, tokenize
from rayfed.models.model_config import ModelConfig
from rayfed.models.shared_weights import attach, checksum, dump, skeleton
from rayfed.seeds import generator
from rayfed.tuning.attention_adapter import AttAI
from rayfed.tuning.base import apply_tuning, export, load, trainable
from rayfed.tuning.full import Full
from rayfed.tuning.head import Head
from rayfed.tuning.residual_adapter import ClipAdapter
from rayfed.tuning.text_prompt import TextPrompt
from tests.pretended import pretended
from tests.rayfed.models.small import images
from tests.rounding import equally_near, exactly

NAMES = ("zero", "alarm_clock", "dog")
SMALL = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 2})


def build(config=SMALL, names=NAMES):
    return build_backbone(config, names, 0).eval()


def original(depth=2):
    """open_clip's model with the weights of `build`."""
    from rayfed.seeds import derive, use_seed

    with use_seed(derive(0, "model")):
        return clip.mini(depth).eval()


@torch.no_grad()
def encodes(model, texts):
    """Fail unless the class features of a model are those of open_clip for these texts."""
    whole, tokens = original(), tokenize(texts)
    judge = exactly(lambda net: net.encode_text(tokens), whole)
    equally_near([whole.encode_text(tokens)], [model.class_features()], [judge])


def count(tuning, config=SMALL):
    with torch.device("meta"):
        model = build_backbone(config, NAMES, 0)
    return sum(p.numel() for p in trainable(apply_tuning(model, tuning, 0)).values())


@torch.no_grad()
def test_scores_are_those_of_open_clip():
    model, whole, x = build(), original(), images(4)
    texts = tokenize([f"a picture of a {name.replace('_', ' ')}" for name in NAMES])
    expected, _ = whole.get_logits(x, texts)
    judge = exactly(lambda net, x: net.get_logits(x, texts)[0], whole, x)
    equally_near([expected], [model(x)], [judge])
    assert torch.equal(model.features(x), whole.encode_image(x))
    assert torch.equal(model.class_features(), whole.encode_text(texts))
    assert model.num_blocks == 2
    assert all(n.startswith(("blocks.", "visual.", "text.", "head.")) for n in model.tensors())


@torch.no_grad()
def test_blocks_can_be_left_out():
    model, x = build(), images(2)
    every = model(x)
    model.active = (1,)
    assert not torch.equal(model(x), every)
    model.active = None
    assert torch.equal(model(x), every)


@torch.no_grad()
def test_a_context_of_the_templates_own_words_gives_the_template():
    model = apply_tuning(build(), TextPrompt(length=5), 0).eval()
    words = tokenize(["a picture of a"])[0, 1:5]
    table = model.text.tower.token_embedding.weight
    model = apply_tuning(build(), TextPrompt(length=4), 0).eval()
    load(model, {"text.context": table[words].clone()})
    encodes(model, [f"a picture of a {n.replace('_', ' ')}." for n in NAMES])


@torch.no_grad()
def test_a_device_is_waited_for_once_to_find_the_ends_of_class_names():
    with pretended() as device:
        model = apply_tuning(build(), TextPrompt(length=4, position="middle"), 0).eval().to(device.name)
        model.class_features()
        device.counts.clear()
        model.class_features()
        assert device.counts.waits == 0


@pytest.mark.parametrize(
    ("position", "prompt"), [("middle", "a picture {} of a."), ("front", "{} a picture of a.")]
)
def test_the_class_name_is_where_the_option_says(position, prompt):
    words = model_words("a picture of a")
    model = apply_tuning(build(), TextPrompt(length=4, position=position), 0).eval()
    load(model, {"text.context": words})
    encodes(model, [prompt.format(n.replace("_", " ")) for n in NAMES])


@torch.no_grad()
def test_each_class_can_have_a_context_of_its_own():
    starts = ("a picture of a", "a photo of a", "an image of a")
    model = apply_tuning(build(), TextPrompt(length=4, class_specific=True), 0).eval()
    load(model, {"text.context": torch.stack([model_words(text) for text in starts])})
    texts = [f"{start} {name.replace('_', ' ')}." for start, name in zip(starts, NAMES, strict=True)]
    encodes(model, texts)


def model_words(text):
    """Embeddings of four words, shape (4, text width)."""
    return build().text.tower.token_embedding.weight[tokenize([text])[0, 1:5]].clone()


@pytest.mark.slow
@pytest.mark.steady
def test_sizes_of_the_tunings():
    big = ModelConfig(name="open_clip/ViT-B-32-quickgelu", pretrained=False)
    assert count(AttAI(), big) == 525_312
    assert count(AttAI(text_side=True), big) == 1_050_624
    assert [count(ClipAdapter(multiplier=m), big) for m in (1, 2, 4, 8)] == [
        524_288 * m for m in (1, 2, 4, 8)
    ]
    assert count(TextPrompt(), big) == 8_192
    assert count(TextPrompt(class_specific=True), big) == 3 * 8_192
    assert count(Head(), big) == 3 * 512
    assert count(Full(), big) == 151_277_313 - 1  # all but the scale of the cosines
    assert count(AttAI()) == 2 * (64 * 64 + 64)


@pytest.mark.parametrize("tuning", [AttAI(), AttAI(text_side=True), ClipAdapter(), TextPrompt(), Full()])
def test_only_the_tuning_learns_and_shared_weights_give_the_same_model(tuning):
    model = apply_tuning(build(), tuning, 0)
    empty = skeleton(lambda: apply_tuning(build_backbone(SMALL, NAMES, 0), tuning, 0))
    attach(empty, dump(model))
    x, y = images(4), torch.tensor([0, 1, 2, 0])
    assert torch.equal(model.eval()(x), empty.eval()(x))
    before = checksum(model)
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.1)
    start, first = export(model), None
    for _ in range(8):
        optimizer.zero_grad()
        loss = F.cross_entropy(model.train()(x), y)
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    assert loss.item() < first
    assert checksum(model) == before
    assert any(not torch.equal(value, start[name]) for name, value in export(model).items())


def test_frozen_features_are_those_of_the_network_unless_it_trains():
    frozen, full = apply_tuning(build(), AttAI(), 0).eval(), apply_tuning(build(), Full(), 0).eval()
    assert frozen.has_frozen_features
    assert not full.has_frozen_features
    x = images(3)
    fresh = frozen(x)
    frozen.remember_frozen_features(x, 2 * frozen.net(x))
    assert not torch.equal(frozen.features(x), fresh)  # what was noted is used
    probe = x.clone().requires_grad_()
    assert torch.autograd.grad(frozen(probe).sum(), probe)[0].abs().sum() > 0


def test_errors_name_the_key():
    with pytest.raises(ConfigError, match=r"model\.name: 'open_clip/ViT-B-33' does not exist"):
        build(ModelConfig(name="open_clip/ViT-B-33"))
    with pytest.raises(ConfigError, match=r"model\.name: .* text tower of another library"):
        build(ModelConfig(name="open_clip/coca_ViT-B-32", pretrained=False))
    with pytest.raises(ConfigError, match=r"model\.template: 'a dog' has no \{\}"):
        build(ModelConfig(name="clip_mini", pretrained=False, template="a dog"))
    with pytest.raises(ConfigError, match=r"model\.size: 64 is not allowed: 'clip_mini' takes 32 only"):
        build(ModelConfig(name="clip_mini", pretrained=False, size=64))
    with pytest.raises(ConfigError, match=r"tuning\.length: 30 leaves no room"):
        apply_tuning(build(), TextPrompt(length=30), 0)
    plain = build_backbone(ModelConfig(name="vit_mini", pretrained=False), 3, 0)
    with pytest.raises(ConfigError, match="class prompts need a text tower"):
        apply_tuning(plain, TextPrompt(), 0)


def test_published_weights_that_cannot_be_had_are_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = networks.find_model("open_clip/ViT-B-32-quickgelu", "openai")
    assert (known.is_tag, known.size, known.width) == (True, 224, 512)
    assert known.published.repository == "timm/vit_base_patch32_clip_224.openai"
    assert known.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert not networks.find_model("open_clip/ViT-B-32-quickgelu", "no_such.safetensors").is_tag


def test_a_local_file_is_read(tmp_path):
    whole = original()
    path = tmp_path / "clip.safetensors"
    save_file({n: v.contiguous() for n, v in whole.state_dict().items()}, path)
    model = build(ModelConfig(name="clip_mini", weights=str(path), options={"depth": 2}))
    assert torch.equal(model.features(images(2)), whole.encode_image(images(2)))


def test_tokenizer():
    rows = tokenize(["a 0.", "zero", "dog", "x " * 50])
    begin, end = len(VOCABULARY) - 2, len(VOCABULARY) - 1
    words = [[VOCABULARY[i] for i in row if i] for row in rows]
    assert words[0] == ["<begin>", "a", "zero", ".", "<end>"]
    assert words[2][1:-1] == ["d", "o", "g"]
    assert rows.shape == (4, CONTEXT)
    assert (rows.argmax(1) == (rows == end).float().argmax(1)).all()
    assert rows[3, 0] == begin
    assert rows[3, -1] == end


def test_captions_name_the_glyph():
    names = class_names()
    assert len(names) == len(set(names)) == 122
    speak = Captioner(generator(0, "test"))
    label = names.index("capital b")
    found = {
        " ".join(VOCABULARY[i] for i in row[1:] if 0 < i < len(VOCABULARY) - 1)
        for row in speak(torch.full((200,), label), torch.full((200,), 1))
    }
    assert "a picture of a capital b" in found
    assert "eight shape , white on black" in found
    assert all("capital b" in text or "eight shape" in text for text in found)


def test_the_shipped_weights_match_pictures_with_captions():
    from benchmarks.glyph_pool import GlyphPool, PoolStyle

    file = files("rayfed.models") / "weights" / "clip_mini.safetensors"
    assert len(file.read_bytes()) < 6e6
    clip.mini().load_state_dict(load_file(str(file)), strict=True)
    pool = GlyphPool()
    model = build(ModelConfig(name="clip_mini"), class_names())
    pictures, labels = pool.batch(400, generator(5, "test"), PoolStyle().eased(0.3))
    with torch.no_grad():
        accuracy = (model(pictures * 2 - 1).argmax(1) == labels).float().mean()
    assert accuracy > 0.5  # chance is 0.008
