"""Frozen features on disk: one file for a set of images, whoever owns it; no error where it cannot be."""

import numpy as np
import torch

from rayfed.executors.features import FeatureFolder


def test_a_set_of_images_has_one_file_whoever_owns_it(tmp_path):
    splits = {
        "a": {"train": np.array([1, 2])},
        "b": {"train": np.array([1, 2])},
        "c": {"train": np.array([2])},
    }
    folder = FeatureFolder(tmp_path, splits)
    folder["a", "train", (0, 1)] = torch.ones(2, 3)
    again = FeatureFolder(tmp_path, splits)
    assert ("b", "train", (0, 1)) in again
    assert torch.equal(again["b", "train", (0, 1)], torch.ones(2, 3))
    assert ("c", "train", (0, 1)) not in again
    assert ("a", "train", (0,)) not in again  # another depth


def test_features_that_cannot_be_written_stay_in_memory(tmp_path):
    (tmp_path / "occupied").write_text("a file where the folder would be")
    splits = {"a": {"train": np.array([1, 2])}}
    folder = FeatureFolder(tmp_path / "occupied", splits)
    folder["a", "train", (0,)] = torch.ones(2, 3)
    assert torch.equal(folder["a", "train", (0,)], torch.ones(2, 3))
    assert ("a", "train", (0,)) not in FeatureFolder(tmp_path / "occupied", splits)


def test_a_file_is_written_whole(tmp_path):
    folder = FeatureFolder(tmp_path / "new", {"a": {"train": np.array([1, 2])}})
    folder["a", "train", (0,)] = torch.ones(2, 3)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".npy"]
