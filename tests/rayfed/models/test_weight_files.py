"""Weights are downloaded from the right place, once and whole; what goes wrong is one clear line.

The hub and the addresses are a small server on the loopback address.
"""

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save

from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.federation.params import digest
from rayfed.models import weight_files
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.models.networks import construct_network
from rayfed.models.weight_files import PublishedWeights, locate
from tests.conftest import quickly
from tests.rounding import equally_near, exactly

CLASSES = 5
COMMIT = "1" * 40


class Hub(ThreadingHTTPServer):
    """Serves files by path; an answer has at most `most` bytes, `wrong` announces another digest."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {}
        self.asked = []
        self.most = None
        self.wrong = self.down = False
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        hub = self.server
        path = self.path.partition("?")[0]
        if not path.startswith("/api/"):  # the library's own questions
            hub.asked.append((self.command, path))
        data = hub.files.get(path)
        if hub.down or data is None:
            self.send_response(503 if hub.down else 404)
            self.send_header("X-Error-Code", "" if hub.down else "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        known = "0" * 64 if hub.wrong else hashlib.sha256(data).hexdigest()
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        for name, value in (
            ("X-Repo-Commit", COMMIT),
            ("ETag", f'"{known}"'),
            ("Content-Length", str(len(data) - start)),
            ("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            end = len(data) if hub.most is None else start + hub.most
            self.wfile.write(data[start:end])
            self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with empty caches."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the waits between the attempts of the library
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def weights_of(name, **options):
    """The network of a model, and the content of a file of its weights."""
    net = construct_network(ModelConfig(name=name, pretrained=False, **options)).net
    return net, save({key: value.contiguous() for key, value in net.state_dict().items()})


RESNET = "/timm/resnet10t.c3_in1k/resolve/main/model.safetensors"


def test_a_model_of_timm_is_downloaded_once_and_is_what_was_served(hub):
    net, hub.files[RESNET] = weights_of("resnet10t")
    model = build_backbone(ModelConfig(name="resnet10t"), CLASSES, 3)
    assert digest(dict(model.net.state_dict())) == digest(dict(net.state_dict()))
    assert {path for _, path in hub.asked} == {RESNET}
    asked = len(hub.asked)
    again = build_backbone(ModelConfig(name="resnet10t"), CLASSES, 4)
    assert digest(dict(again.net.state_dict())) == digest(dict(net.state_dict()))
    assert len(hub.asked) == asked


def test_the_older_file_is_used_where_the_preferred_one_is_missing(hub, tmp_path):
    net, _ = weights_of("resnet10t")
    torch.save(net.state_dict(), tmp_path / "old.bin")
    older = RESNET.replace("model.safetensors", "pytorch_model.bin")
    hub.files[older] = (tmp_path / "old.bin").read_bytes()
    model = build_backbone(ModelConfig(name="resnet10t"), CLASSES, 3)
    assert digest(dict(model.net.state_dict())) == digest(dict(net.state_dict()))
    assert [path for _, path in hub.asked if path != older] == [RESNET]


CLIP_FILES = {
    "clip_vit_b_16": "timm/vit_base_patch16_clip_224.openai",
    "clip_vit_b_32": "timm/vit_base_patch32_clip_224.openai",
    "clip_rn50": "timm/resnet50_clip.openai",
}
TIMM_FILES = {
    "vit_base_patch16_224_in21k": ("vit_base_patch16_224.augreg_in21k", 0.5, 0.5),
    "deit_small_patch16_224": ("deit_small_patch16_224.fb_in1k", 0.485, 0.229),
    "dinov2_small": ("vit_small_patch14_dinov2.lvd142m", 0.485, 0.229),
    "dinov2_base": ("vit_base_patch14_dinov2.lvd142m", 0.485, 0.229),
    "mixer_b16_224": ("mixer_b16_224.goog_in21k_ft_in1k", 0.5, 0.5),
    "swin_tiny_patch4_window7_224": ("swin_tiny_patch4_window7_224.ms_in1k", 0.485, 0.229),
    "resnet50": ("resnet50.tv_in1k", 0.485, 0.229),
}


@pytest.mark.parametrize("preset", quickly([*CLIP_FILES, *TIMM_FILES], ["clip_rn50", "dinov2_small"]))
def test_every_preset_asks_for_its_file_and_normalises_as_its_model_does(preset, hub):
    config = load_config(["algorithm=fedavg", "tuning=head", f"model={preset}"]).model
    with torch.device("meta"):
        model = build_backbone(config, ["cat", "dog"], 0)
        bare = construct_network(config)
    assert (model.size, model.resize) == (224, "crop")
    if preset in CLIP_FILES:
        repository = CLIP_FILES[preset]
        assert (round(model.mean[0], 4), round(model.std[0], 4)) == (0.4815, 0.2686)
        assert config.template in ("a photo of a {}.", "a picture of a {}")
    else:
        name, mean, std = TIMM_FILES[preset]
        repository = f"timm/{name}"
        assert (model.mean[0], model.std[0]) == (mean, std)
    with pytest.raises(ConfigError, match="are not in the local cache"):
        locate(config.name, bare.published)
    file = bare.published.files[0]
    assert hub.asked[0] == ("HEAD", f"/{repository}/resolve/main/{file}")


def test_a_clip_model_makes_its_class_prompts_with_the_downloaded_text_tower(hub, monkeypatch):
    config = ModelConfig(name="clip_mini", options={"depth": 2}, template="a photo of a {}.")
    bare = construct_network(replace(config, pretrained=False))
    published = PublishedWeights(files=("open_clip_model.safetensors",), repository="maker/clip")
    state = {key: value.contiguous() for key, value in bare.net.state_dict().items()}
    hub.files["/maker/clip/resolve/main/open_clip_model.safetensors"] = save(state)
    monkeypatch.setattr(
        "rayfed.models.build.construct_network",
        lambda config, task: replace(construct_network(config, task), packaged="", published=published),
    )
    model = build_backbone(config, ["cat", "polar_bear"], 0)
    tokens = bare.tokenizer(["a photo of a cat.", "a photo of a polar bear."])
    with torch.no_grad():
        expected = bare.net.eval().encode_text(tokens)
        judge = exactly(lambda net: net.encode_text(tokens), bare.net)
    equally_near([expected], [model.head.weight], [judge])


def failed(hub, source=None):
    """The one line of a download that fails, after which nothing is left in the cache."""
    source = source or PublishedWeights(files=("model.safetensors",), repository="timm/resnet10t.c3_in1k")
    with pytest.raises(ConfigError) as caught:
        locate("resnet10t", source)
    message = str(caught.value)
    assert "\n" not in message
    assert "model.weights=FILE" in message
    assert weight_files._find_cached(source) is None
    return message


def test_a_download_that_breaks_off_is_named_and_the_next_one_is_whole(hub):
    net, hub.files[RESNET] = weights_of("resnet10t")
    size = len(hub.files[RESNET])
    hub.most = size * 2 // 5
    assert f"(received {hub.most} bytes, expected {size})" in failed(hub)
    hub.down = True
    assert "503" in failed(hub)
    hub.most = None
    hub.down = False
    model = build_backbone(ModelConfig(name="resnet10t"), CLASSES, 3)
    assert digest(dict(model.net.state_dict())) == digest(dict(net.state_dict()))


def test_a_wrong_checksum_is_named_and_the_file_removed(hub):
    _, hub.files[RESNET] = weights_of("resnet10t")
    hub.wrong = True
    assert "the file is damaged: its SHA-256 begins with" in failed(hub)


def test_without_a_network_the_host_is_given_up_soon(hub):
    hub.shutdown()
    hub.server_close()
    failed(hub)


ALEXNET = "/models/alexnet-owt-7be5be79.pth"


def at(hub, path):
    return PublishedWeights(files=(path.rpartition("/")[2],), url=hub.url + path)


def test_a_file_at_an_address_is_checked_by_the_digest_in_its_name(hub):
    content = b"weights" * 1000
    good = f"/models/net-{hashlib.sha256(content).hexdigest()[:8]}.pth"
    hub.files = {good: content, ALEXNET: content}
    assert locate("net", at(hub, good)).read_bytes() == content
    assert "the file is damaged: its SHA-256 begins with" in failed(hub, at(hub, ALEXNET))


def test_a_download_from_an_address_that_breaks_off_is_named(hub):
    hub.files["/models/net.pth"] = b"weights" * 1000
    hub.most = 2333
    assert "the download ended after 2333 of 7000 bytes" in failed(hub, at(hub, "/models/net.pth"))


def test_a_file_that_is_no_state_dict_is_named_with_the_key(hub):
    hub.files[RESNET] = b"not weights"
    with pytest.raises(ConfigError, match=r"model.pretrained: .*is not a readable state dict"):
        build_backbone(ModelConfig(name="resnet10t"), CLASSES, 3)
