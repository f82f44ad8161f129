"""Training images are changed at random from the client's own stream; images that are scored are not."""

from dataclasses import replace

import pytest
import torch
from torchvision.transforms import v2

import rayfed
from rayfed.config.schema import load_config, to_dict
from rayfed.data.augmentation import Augmentation
from rayfed.data.data_config import AugmentConfig, Crop, Flip, Grayscale, Jitter, RandAugment, Rotate
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client import Client
from rayfed.testing import small_setup
from tests.rayfed.data.folders import PACS, needs_pacs
from tests.rounding import near

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
EVERY = AugmentConfig(
    crop=Crop(),
    flip=Flip(),
    rotate=Rotate(),
    randaugment=RandAugment(),
    jitter=Jitter(),
    grayscale=Grayscale(p=0.5),
)


def normalised(pixels):
    return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def pixels_of(x):
    return x * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)


@pytest.mark.parametrize("channels", [1, 2])
def test_images_of_a_user_keep_their_channels_and_sides(channels):
    pixels = torch.rand(4, channels, 8, 6, generator=torch.Generator().manual_seed(2))
    one = EVERY if channels == 1 else AugmentConfig(crop=Crop(), flip=Flip(), rotate=Rotate())
    changed = Augmentation.of(one, (8, 6), (0.0,) * 3, (1.0,) * 3)(pixels, 1)
    assert changed.shape == pixels.shape
    assert not torch.equal(changed, pixels)


def test_values_of_a_user_outside_of_0_to_1_stay_as_they_are():
    arrays = torch.linspace(-3, 5, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    own = Augmentation.of(AugmentConfig(flip=Flip(p=1.0)), 8, (0.0,) * 3, (1.0,) * 3, any_values=True)
    assert torch.equal(own(arrays, 1), arrays.flip(-1))
    usual = Augmentation.of(AugmentConfig(flip=Flip(p=1.0)), 8, (0.0,) * 3, (1.0,) * 3)
    assert torch.equal(usual(arrays, 1), arrays.clamp(0, 1).flip(-1))


def images(num=4, size=16):
    return torch.rand(num, 3, size, size, generator=torch.Generator().manual_seed(2))


def augmented(config, pixels, seed=1):
    return pixels_of(Augmentation.of(config, pixels.shape[-1], MEAN, STD)(normalised(pixels), seed))


@pytest.mark.parametrize(
    ("config", "transform"),
    [
        (AugmentConfig(crop=Crop(scale=(0.3, 0.6))), v2.RandomResizedCrop(16, (0.3, 0.6), (0.75, 4 / 3))),
        (AugmentConfig(rotate=Rotate(degrees=45)), v2.RandomRotation(45)),
        (AugmentConfig(randaugment=RandAugment(num_ops=3, magnitude=20)), v2.RandAugment(3, 20)),
        (AugmentConfig(jitter=Jitter(brightness=0.2, hue=0.1)), v2.ColorJitter(0.2, 0.4, 0.4, 0.1)),
        (AugmentConfig(flip=Flip(p=0.3)), v2.RandomHorizontalFlip(0.3)),
        (AugmentConfig(grayscale=Grayscale(p=0.6)), v2.RandomGrayscale(0.6)),
    ],
    ids=lambda value: value.names[0] if isinstance(value, AugmentConfig) else "",
)
def test_each_image_is_changed_on_its_own_as_torchvision_does(config, transform):
    pixels = images()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = torch.stack([transform(image) for image in pixels])
    # Two operations before and two after, in which values are up to 1 / STD; at most ten in between.
    near(augmented(config, pixels, seed=5), expected, 2 + 10 + 2, size=1.0)


def test_they_are_applied_in_the_documented_order():
    assert EVERY.names == ("crop", "flip", "rotate", "randaugment", "jitter", "grayscale")
    kinds = Augmentation.of(EVERY, 16, MEAN, STD).transform.transforms
    assert [type(kind).__name__ for kind in kinds] == [
        *("RandomResizedCrop", "RandomHorizontalFlip", "RandomRotation"),
        *("RandAugment", "ColorJitter", "RandomGrayscale"),
    ]


def test_the_seed_decides_and_the_global_stream_is_left_alone():
    pixels = images()
    before = torch.get_rng_state()
    first = augmented(EVERY, pixels)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(augmented(EVERY, pixels), first)
    assert not torch.equal(augmented(EVERY, pixels, seed=2), first)


def watched(monkeypatch, *overrides):
    """The inputs that every method asks a client for in a run, by whether they are for training."""
    seen = {"training": [], "scoring": []}
    batches = Client._pass

    def note(client, split, order, size, augmented=False):
        stored = client.data.batches(split, order, size)
        for (x, y), (plain, _) in zip(batches(client, split, order, size, augmented), stored, strict=True):
            seen["training" if augmented else "scoring"].append(torch.equal(x, plain))
            yield x, y

    monkeypatch.setattr(Client, "_pass", note)
    setup = small_setup("algorithm=fedavg", "data.domains=[plain]", *overrides)
    executor = InlineExecutor(setup.context, setup.weights)
    from rayfed.engine.loop import run_rounds

    for _ in run_rounds(setup.experiment, executor, setup.start):
        pass
    return seen


def test_only_training_batches_are_changed(monkeypatch):
    seen = watched(monkeypatch, "data.augment=[crop]")
    assert seen["training"]
    assert not any(seen["training"])
    assert seen["scoring"]
    assert all(seen["scoring"])


def test_features_of_changed_images_are_not_those_of_the_cache():
    options = ("tuning=head", "data.domains=[plain]", "algorithm=fedavg", "train.cache_features=auto")
    plain = small_setup(*options)
    turned = replace(plain.context, augment=AugmentConfig(rotate=Rotate(degrees=180)))
    results = []
    for context in (plain.context, turned):
        from rayfed.engine.loop import run_rounds

        *_, last = run_rounds(plain.experiment, InlineExecutor(context, plain.weights), plain.start)
        results.append(last.state.params["head.weight"])
    assert not torch.equal(*results)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("none", ()),
        ("null", ()),
        ("[]", ()),
        ("flip", ("flip",)),
        ("[jitter,crop]", ("crop", "jitter")),
        ("{flip: {p: 1}, rotate: {}}", ("flip", "rotate")),
    ],
)
def test_a_list_of_names_is_short_for_a_section(text, names):
    config = load_config(["algorithm=fedavg", f"data.augment={text}"])
    assert (config.data.augment.names if config.data.augment else ()) == names
    again = load_config(["algorithm=fedavg", "data.augment.flip.p=0.25"])
    assert again.data.augment == AugmentConfig(flip=Flip(p=0.25))


def test_the_saved_config_has_every_number(tmp_path):
    config = load_config(["algorithm=fedavg", "data.augment=[jitter]"])
    saved = to_dict(config)["data"]["augment"]
    assert saved["jitter"] == {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.4}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.augment=[flop]"], "data.augment.flop: no such key; did you mean 'flip'?"),
        (["data.augment=[flip,flip]"], "data.augment: 'flip' is not a name that is listed once"),
        (["data.augment=[3]"], "data.augment: 3 is not a name"),
        (["data.augment.flip.p=2"], "data.augment.flip.p: 2 is not allowed; it must be at most 1"),
        (["data.augment.crop.scale=[0,1]"], "data.augment.crop.scale.0: 0 is not allowed"),
        (["data.augment.jitter.hue=0.6"], "data.augment.jitter.hue: 0.6 is not allowed"),
        (
            ["data.augment=[flip]", "train.cache_features=true"],
            "data.augment: cannot be used with train.cache",
        ),
        (
            ["data=prostate_mini", "model.options={width: 4}", "tuning=full", "data.augment=[flip]"],
            "data.augment: flip would change the inputs, not the targets; it is for classification",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(overrides, words):
    with pytest.raises(ConfigError) as caught:
        small_setup("algorithm=fedavg", *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_text_is_not_augmented(shared, tmp_path):
    with pytest.raises(ConfigError, match="the data set is for next_character"):
        rayfed.simulate(
            [
                *("data=shakespeare", f"data.root={shared / 'data' / 'shakespeare'}", "data.augment=[flip]"),
                *(
                    "algorithm=fedavg",
                    "cluster=inline",
                    "data.limit=20",
                    "rounds=1",
                    f"output={tmp_path / 'run'}",
                ),
            ]
        )


@pytest.mark.slow
@pytest.mark.steady
@needs_pacs
def test_real_pictures_are_augmented_by_one_command(small):
    options = ("data=pacs", f"data.root={PACS}", "data.limit=8", "data.val=0", "train.epochs=2", "rounds=1")
    plain = small(*options)
    augmented = small(*options, "data.augment=[flip,crop,jitter,grayscale]")
    assert augmented.sha256 != plain.sha256
    assert small(*options, "data.augment=[flip,crop,jitter,grayscale]").sha256 == augmented.sha256
