"""A trained model takes inputs as users have them, and a library loads it with the same outputs."""

import csv
import json

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import rayfed
from rayfed.data.examples import Normalizer
from rayfed.errors import ConfigError
from tests.rounding import equally_near, exactly
from tests.tiny_models import TEXTS, save

BRIEF = {"rounds": 1, "cluster": "inline", "figures": False, "tensorboard": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    with (root / "mails.csv").open("w", newline="") as file:
        rows = [
            (f"{text} {word}", word, who)
            for text in TEXTS
            for word in ("card", "rate", "one")
            for who in "ab"
        ]
        csv.writer(file).writerows([("body", "folder", "user"), *rows])
    with (root / "asked.jsonl").open("w") as file:
        for text in TEXTS * 2:
            file.write(json.dumps({"prompt": text[:9], "completion": text[9:30], "user": "ann"}) + "\n")
    for family in ("bert", "gpt2"):
        save(family, root / family)
    for family in ("llama", "qwen2"):
        save(family, root / family, language=True)
    return root


def run_of_texts(folder, cache, family, **given):
    language = family in ("llama", "qwen2")
    name, root = ("jsonl", "asked.jsonl") if language else ("csv", "mails.csv")
    columns = {"client": "user"} if language else {"text": "body", "label": "folder", "client": "user"}
    data = {
        "name": name,
        "root": str(folder / root),
        "columns": columns,
        "cache": str(cache),
        "val": 1,
        "test": 1,
    }
    data["partition"] = {"scheme": "natural", "min_samples": 1}
    return rayfed.Experiment(
        **{"method": "fedavg", "tuning": "lora", **BRIEF, **given},
        model=f"hf/{folder / family}",
        data={**data, "reader": name},
        train={"lr": 0.05, "batch_size": 8},
    ).run()


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "qwen2"])
def test_texts_are_read_and_transformers_loads_what_was_saved(folder, cache, tmp_path, family):
    import transformers

    run = run_of_texts(folder, cache, family)
    path = run.save_pretrained(tmp_path / family)
    language = family in ("llama", "qwen2")
    kind = transformers.AutoModelForCausalLM if language else transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ours = run.model()
    for text in TEXTS:
        tokens = tokenizer(text, return_tensors="pt")
        tokens.pop("token_type_ids", None)
        judge = exactly(lambda model, text=text: model(text), ours)
        equally_near([ours(text)], [theirs(**tokens).logits], [judge])
    if not language:
        assert theirs.config.id2label == dict(enumerate(run.classes)) == {0: "card", 1: "one", 2: "rate"}
        single = torch.cat([ours(text) for text in TEXTS])
        equally_near([single], [ours(TEXTS)], [exactly(lambda model: model(TEXTS), ours)])


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Image files of two classes, larger than the network's input."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for domain in "ab":
        for kind in ("cat", "dog"):
            (root / domain / kind).mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / domain / kind / f"{i}.png")
    return root


def run_of_photos(photos, cache, model, tuning, **given):
    data = {
        "name": "photos",
        "reader": "image_folder",
        "root": str(photos),
        "cache": str(cache),
        "test": 0.25,
    }
    return rayfed.Experiment(
        **{"method": "fedavg", **BRIEF, **given},
        model=model,
        tuning=tuning,
        data=data,
        train={"lr": 0.05, "batch_size": 8},
    ).run()


def three_forms(photos):
    """The paths of three images, the images, and their pixels."""
    files = sorted(photos.rglob("*.png"))[:3]
    images = [Image.open(file) for file in files]
    return files, images, [np.asarray(image) for image in images]


TINY = {"name": "test_vit", "pretrained": False, "size": 32}


@torch.no_grad()
@pytest.mark.parametrize("tuning", ["lora", "full", peft.LoraConfig(use_dora=True, target_modules=["qkv"])])
def test_images_are_read_and_timm_loads_what_was_saved(photos, cache, tmp_path, tuning):
    import timm

    run = run_of_photos(photos, cache, TINY, tuning)
    ours = run.model()
    path = run.save_pretrained(tmp_path)
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    files, images, pixels = three_forms(photos)
    found = ours(files)
    assert torch.equal(found, ours(images))
    assert torch.equal(found, ours([str(file) for file in files]))
    assert torch.equal(found, ours(pixels))
    assert torch.equal(ours(files[:1]), ours(files[0]))
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    assert transform(images[0]).shape == (3, 32, 32)
    seen = []
    ours.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    ours(files)
    judge = exactly(lambda model, x: model(x), ours, seen[0])
    equally_near([found], [theirs(seen[0])], [judge])
    trained_with = Normalizer(theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["std"])(
        torch.from_numpy(run._setup.dataset.images[np.arange(16)])
    )
    assert all(any(torch.equal(x, each) for each in trained_with) for x in seen[0])
    assert (
        json.loads((tmp_path / "config.json").read_text())["label_names"]
        == list(run.classes)
        == ["cat", "dog"]
    )


@torch.no_grad()
def test_a_users_network_gets_values_and_is_saved_with_names_of_classes(tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 2))
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (12, 2, 2, 3), dtype=np.uint8)
    data = {name: (pixels, ["no", "yes"] * 6) for name in "ab"}
    run = rayfed.Experiment(
        model=rayfed.Model(net, mean=0.5, std=0.25), data=data, rounds=1, cluster="inline"
    ).run()
    ours = run.model()
    by_hand = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    equally_near([ours(by_hand)], [ours(pixels)], [exactly(lambda model, x: model(x), ours, by_hand)])
    assert torch.equal(ours(pixels[3]), ours(pixels[3:4]))
    path = run.save_pretrained(tmp_path)
    net.load_state_dict(load_file(path / "model.safetensors"))
    assert torch.equal(net(by_hand), ours(by_hand))
    assert json.loads((path / "config.json").read_text()) == {"id2label": {"0": "no", "1": "yes"}}


@torch.no_grad()
def test_an_adapter_of_peft_and_modules_that_it_saves_become_parts_of_the_network(folder, cache, tmp_path):
    import transformers

    config = peft.LoraConfig(
        init_lora_weights="pissa", use_dora=True, r=2, target_modules=["query"], modules_to_save=["LayerNorm"]
    )
    run = run_of_texts(folder, cache, "bert", tuning=config)
    path = run.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(path)(TEXTS[0], return_tensors="pt")
    ours = run.model()
    judge = exactly(lambda model: model(TEXTS[0]), ours)
    equally_near([ours(TEXTS[0])], [theirs(**tokens).logits], [judge])
    assert "LayerNorm.modules_to_save" in " ".join(run.params)


@torch.no_grad()
def test_a_personal_model_is_saved_merged_and_as_adapters(folder, cache, tmp_path):
    import transformers

    run = run_of_texts(folder, cache, "bert", method="fedsa_lora")
    client = run.clients.index[1]
    path = run.save_pretrained(tmp_path / "merged", client=client)
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    adapter = run.save_pretrained(tmp_path / "adapter", client=client, merged=False)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "bert", num_labels=3, ignore_mismatched_sizes=True
    )
    adapted = peft.PeftModel.from_pretrained(base, adapter).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ours = run.personal(client)
    tokens = tokenizer(TEXTS[0], return_tensors="pt")
    judge = exactly(lambda model: model(TEXTS[0]), ours)
    for theirs in (merged, adapted):
        equally_near([ours(TEXTS[0])], [theirs(**tokens).logits], [judge])
    assert not torch.equal(ours(TEXTS[0]), run.personal(run.clients.index[0])(TEXTS[0]))


def test_what_a_library_cannot_hold_is_refused(photos, cache, tmp_path):
    run = run_of_photos(photos, cache, TINY, "ssf")
    with pytest.raises(
        ConfigError, match="which was trained, is no part of 'test_vit' as its library has it"
    ):
        run.save_pretrained(tmp_path)
