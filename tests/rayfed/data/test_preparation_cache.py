import pytest

from rayfed.data.data_config import DataConfig
from rayfed.data.preparation import cache_folder
from rayfed.errors import ConfigError


def test_cache_folder(tmp_path, monkeypatch):
    config = DataConfig(name="x", reader="image_folder")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAYFED_CACHE", raising=False)
    assert cache_folder(config) == tmp_path / ".cache" / "rayfed"
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "env"))
    assert cache_folder(config) == tmp_path / "env"
    config = DataConfig(name="x", reader="image_folder", cache=str(tmp_path / "own"))
    assert cache_folder(config) == tmp_path / "own"
    assert (tmp_path / "own").is_dir()


def test_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache: cannot make .*RAYFED_CACHE"):
        cache_folder(DataConfig(name="x", reader="image_folder", cache=str(tmp_path / "file" / "cache")))
