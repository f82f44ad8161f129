"""Networks of a user: heads that are found, adapters on any layer, values that are shared and not copied."""

import pickle

import pytest
import torch
from torch import nn

from rayfed import LoRA, Model
from rayfed.config.own_network import network_of, register
from rayfed.errors import ConfigError
from rayfed.models.fit_network import fit
from rayfed.models.shared_weights import attach, dump, skeleton
from rayfed.models.user_model import output_of
from rayfed.tuning.adapter import Adapter
from rayfed.tuning.base import apply_tuning, export
from rayfed.tuning.ia3 import IA3
from tests.rounding import near


class Net(nn.Module):
    """Two convolutions, an attention of torch and a linear layer."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 8, 3, 2)
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden, self.out = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.two(self.one(x).relu()).flatten(2).mT
        return self.out(self.hidden(self.mix(tokens, tokens, tokens)[0].mean(1)))


def network(value, x=None):
    return fit(network_of(register(value)), torch.zeros(2, 3, 16, 16) if x is None else x, 0)


def tuned(value, scheme, x=None):
    return apply_tuning(network(value, x).build(5, 0), scheme, 0)


def test_the_last_layer_is_the_head_and_the_output_stays_the_same():
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 16, 16)
    model = network(net).build(5, 0).eval()
    assert isinstance(model.head, nn.Linear)
    assert model.width == 8
    assert torch.equal(model(x), net(x))
    whole = model.deployed()
    assert list(whole.state_dict()) == list(net.state_dict())
    assert torch.equal(whole(x), net(x))


def test_a_network_whose_output_is_changed_after_its_last_layer_has_no_head():
    class Scaled(Net):
        def forward(self, x):
            return 2 * super().forward(x)

    model = network(Scaled()).build(5, 0)
    assert model.num_classes == 5
    assert not list(model.head.parameters())
    with pytest.raises(ConfigError, match="is not that of its module 'out'; name another head="):
        network(Model(Scaled(), head="out"))


def test_adapters_go_to_convolutions_and_linear_layers_by_name():
    names = set(export(tuned(Net(), LoRA(rank=2, targets=r"one|hidden"))))
    assert names == {"one.lora_A", "one.lora_B", "hidden.lora_A", "hidden.lora_B", "head.weight", "head.bias"}
    assert {n for n in export(tuned(Net(), LoRA(rank=2, targets=["two"]))) if "lora" in n} == {
        "two.lora_A",
        "two.lora_B",
    }
    assert any("hidden" in n for n in export(tuned(Net(), IA3(targets="hidden"))))
    assert any("hidden.adapter" in n for n in export(tuned(Net(), Adapter(targets="hidden", bottleneck=2))))
    assert {n for n in export(tuned(Net(), LoRA(rank=2))) if "lora_A" in n} == {"hidden.lora_A"}


def test_packed_weights_of_an_attention_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"'mix\.out_proj' .* is part of an attention of torch, which reads its weights"
    ):
        tuned(Net(), LoRA(targets=r"mix\.out_proj"))


class Encoder(nn.Module):
    """A layer of torch that has a fused form in scoring, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        if len(x) == 3:
            raise ValueError("three")
        padding = torch.arange(x.shape[1]).expand(x.shape[:2]) >= x.shape[1] - 1
        return self.out(self.layers(x, src_key_padding_mask=padding)[:, :-1].mean(1))


def test_an_adapter_in_a_fused_layer_counts_in_scoring_and_the_switch_of_torch_stays():
    """Otherwise the next experiment would round otherwise than in a process without this one."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    model = tuned(Encoder(), LoRA(rank=2, targets=["linear1"]), x).eval()
    with torch.no_grad():
        before = model(x)
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.fill_(1.0)
        assert not torch.equal(model(x), before)
        # Sums of 8 to 16 numbers in six products, two norms and a softmax: about 100 roundings on the way.
        near(model.deployed().eval()(x), model(x), 100, 10.0)
        with pytest.raises(ValueError, match="three"):
            model(torch.zeros(3, 4, 8))
    with pytest.raises(ConfigError, match="three"):
        network(Encoder(), torch.zeros(3, 4, 8))
    assert torch.backends.mha.get_fastpath_enabled()


def test_values_travel_apart_and_have_no_memory_in_common_with_the_network_of_the_user():
    net = Net()
    found = network(net)
    sent = pickle.loads(pickle.dumps(found))
    assert sent.values is None
    assert all(p.is_meta for p in sent.shape.parameters())
    assert len(pickle.dumps(found)) < 20_000
    model = apply_tuning(found.build(5, 0), LoRA(rank=2, targets="one"), 0)
    arrays = dump(model)
    assert arrays["net.body.two.weight"].__array_interface__["data"][0] != net.two.weight.data_ptr()
    assert (
        arrays["net.body.two.weight"].__array_interface__["data"][0] == model.net.body.two.weight.data_ptr()
    )
    there = skeleton(lambda: apply_tuning(sent.build(5, 0), LoRA(rank=2, targets="one"), 0))
    attach(there, arrays)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(there.eval()(x), model.eval()(x))


def test_parameters_that_the_user_froze_stay_frozen():
    from rayfed.tuning.full import Full

    net = Net()
    net.one.requires_grad_(False)
    assert not [n for n in export(tuned(net, Full())) if n.startswith("one.")]


def test_a_function_makes_the_same_values_in_every_process():
    def make():
        return nn.Linear(3, 2)

    found = network(make, torch.zeros(2, 3))
    assert torch.equal(found.net(7).weight, found.net(7).weight)
    assert not torch.equal(found.net(7).weight, found.net(8).weight)


def test_the_tensor_of_outputs_is_found():
    x = torch.zeros(1)
    assert all(output_of(each) is x for each in (x, (x, 1), {"out": x}, type("Output", (), {"logits": x})()))
    with pytest.raises(TypeError, match="returns str"):
        output_of("x")


def test_a_network_that_returns_several_tensors_is_refused():
    """The first one may be features, which would be trained as if they were outputs."""

    class Pair(Net):
        def forward(self, x):
            return x.mean((2, 3)), super().forward(x)

    with pytest.raises(
        ConfigError, match=r"a tuple of tensors of shapes \(2, 3\) and \(2, 5\); return the outputs"
    ):
        network(Pair())


class Last(nn.Module):
    """A linear layer after which, or around which, something happens that the start values may hide."""

    kind = ""

    def __init__(self, width=8):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.o = nn.Linear(6, width), nn.Linear(width, 3)
        self.zero, self.one = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(()))
        self.d = nn.Dropout(0.5)

    def forward(self, x):
        return getattr(self, self.kind)(torch.relu(self.a(x)))

    def plain(self, h):
        return self.o(h)

    def clamped(self, h):
        return self.o(h).clamp(-50, 50)

    def clamped_in_place(self, h):
        return self.o(h).clamp_(-50, 50)

    def clamped_unseen(self, h):
        out = self.o(h)
        out.data.clamp_(-5, 5)
        return out

    def biased(self, h):
        return self.o(h) + self.zero

    def scaled(self, h):
        return self.one * self.o(h)

    def dropped(self, h):
        return self.d(self.o(h))

    def noisy(self, h):
        out = self.o(h)
        return out + 0.1 * torch.randn_like(out) if self.training else out

    def twice(self, h):
        return self.o(h) if self.o(h) is not None else h

    def read(self, h):
        return self.o(h + 0 * self.o.weight.sum())

    def residual(self, h):
        return self.o(h) + self.zero.mean() * h[:, :3]


KINDS = ("clamped", "clamped_in_place", "clamped_unseen", "biased", "scaled", "dropped", "noisy", "twice")
KINDS = (*KINDS, "read", "residual")


@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_the_last_layer_stays_after_it(kind, width):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    net = type("Net", (Last,), {"kind": kind})(width)
    found = network(net, x)
    assert found.said.head is None
    assert found.notes[0].startswith("model: its module 'o' is not its head, because ")
    with pytest.raises(ConfigError, match="is not that of its module 'o'; name another head="):
        network(Model(net, head="o"), x)


@pytest.mark.parametrize("width", [3, 8])
def test_an_ordinary_last_layer_is_a_head_and_needs_no_note(width):
    x = torch.randn(2, 6)
    found = network(type("Net", (Last,), {"kind": "plain"})(width), x)
    assert (found.said.head, found.notes) == ("o", ())
    assert network(Model(type("Net", (Last,), {"kind": "plain"})(), head=None), x).said.head is None


def test_a_list_of_blocks_that_is_not_gone_through_once_stays_a_list():
    class Backwards(nn.Module):
        def __init__(self, ways):
            super().__init__()
            self.ways = ways
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.out = nn.Linear(4, 2)

        def forward(self, x):
            if self.ways == "by number":
                x = self.blocks[0](self.blocks[2](x))
            else:
                for block in self.blocks:
                    x = block(x).relu()
            return self.out(x)

    x = torch.randn(2, 4)
    model = network(Backwards("by iteration"), x).build(2, 0)
    assert model.num_blocks == 3
    whole = Backwards("by number").eval()
    found = network(whole, x)
    assert torch.equal(found.build(2, 0).eval()(x), whole(x))


@pytest.mark.parametrize(
    "method", ["fedavg", "fedsam", "fedkseed", "moon", "fft_gp", "bgp", "fedmix", "fedprox"]
)
def test_a_network_that_changes_its_input_gives_the_bits_of_one_that_does_not(method):
    import numpy as np

    import rayfed

    rng = np.random.default_rng(0)
    data = {k: (rng.normal(size=(40, 6)).astype("f4"), rng.integers(0, 3, 40)) for k in "ab"}
    digests = set()
    for inplace in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.LeakyReLU(0.5, inplace=inplace), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        own = {"tuning": "full", "model": net, "data": data, "rounds": 2, "cluster": "inline"}
        digests.add(rayfed.Experiment(method=method, **own).run(quiet=True).sha256)
    assert len(digests) == 1


class HeadFirst(nn.Module):
    """Layers in another order than that in which they are made; what is made last is no linear layer."""

    def __init__(self, kind):
        super().__init__()
        pointwise = kind == "pointwise"
        self.out = nn.Conv2d(8, 3, 1) if pointwise else nn.Linear(8, 3)
        self.into = nn.Conv2d(2, 8, 3) if pointwise else nn.Linear(6, 8)
        self.norm = nn.BatchNorm2d(8) if pointwise else nn.LayerNorm(8)
        self.counts, self.passes = kind == "counts", 0

    def forward(self, x):
        self.passes += self.counts
        return self.out(self.norm(self.into(x)).relu() + 0.1 * self.passes)


@pytest.mark.parametrize("kind", ["linear", "pointwise", "counts"])
def test_the_head_is_the_layer_that_returns_the_output_wherever_it_was_made(kind):
    x = torch.randn(2, 2, 5, 5) if kind == "pointwise" else torch.randn(2, 6)
    assert fit(network_of(register(HeadFirst(kind))), x, 0).said.head == "out"


def test_tuning_of_the_head_of_a_network_without_one_is_refused_with_the_reason():
    import numpy as np

    import rayfed

    net = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    data = {"a": (np.random.default_rng(0).normal(size=(20, 6)).astype("f4"), np.arange(20) % 3)}
    with pytest.raises(ConfigError, match="No layer of it is a head, a linear layer or 1 x 1 convolution"):
        rayfed.Experiment(method="fedavg", model=net, data=data, tuning="head", cluster="inline").run()
