"""The last block of a vision transformer for the class token alone: the same features, but for rounding."""

from copy import deepcopy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.executors.worker import adjust_trunk
from rayfed.federation.train_config import TrainConfig
from rayfed.models.attention import use_class_token, use_direct_attention
from rayfed.models.blocks import BlockStack
from tests.rounding import equally_near

WIDTH = 24
CASES = {
    "plain": {},
    "layer scale": {"init_values": 0.1},
    "normalised queries and keys": {"qk_norm": True},
    "normalised output of the attention": {"scale_attn_norm": True},
    "stochastic depth": {"drop_path_rate": 0.5},
    "more tokens before the patches": {"reg_tokens": 3},
    "norm after the pool": {"fc_norm": True},
}


def network(**options):
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": 3, "num_heads": 3, "num_classes": 0}
    net = VisionTransformer(**size, **options)
    net.blocks = BlockStack(*net.blocks.children())
    use_direct_attention(net)
    return net


def both(change=lambda net: None, **options):
    """A network whose blocks compute all tokens, and a copy whose last one computes the class token."""
    whole = network(**options)
    change(whole)
    short = deepcopy(whole)
    use_class_token(short)
    return whole, short


def passed(net, **options):
    """Features, and the gradients of the images and of all parameters."""
    torch.manual_seed(1)
    x = torch.randn(5, 3, 16, 16).to(net.cls_token.dtype if net.cls_token is not None else torch.float32)
    x.requires_grad_()
    features = net(x, **options)
    used = [p for p in net.parameters() if p.requires_grad]
    grads = torch.autograd.grad(features.sin().sum(), [x, *used], allow_unused=True)
    return [features, *(features.new_zeros(1) if grad is None else grad for grad in grads)]


def tokens_of_mlps(net, **options):
    """Tokens for each image that the MLP of each block that runs is given."""
    found = []
    hooks = [
        block.mlp.fc1.register_forward_hook(lambda layer, inputs, output: found.append(inputs[0].shape[1]))
        for block in net.blocks.children()
    ]
    net(torch.randn(2, 3, 16, 16), **options)
    for hook in hooks:
        hook.remove()
    return found


def assert_alike(whole, short):
    equally_near(passed(whole), passed(short), passed(deepcopy(whole).double()))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_features_and_gradients_differ_by_rounding_only(case, training):
    whole, short = both(**CASES[case])
    assert_alike(whole.train(training), short.train(training))
    tokens = 17 + CASES[case].get("reg_tokens", 0)
    assert tokens_of_mlps(whole) == [tokens] * 3
    assert tokens_of_mlps(short) == [tokens, tokens, 1]


@pytest.mark.parametrize("active", [(0, 1), (2,), (0, 2)])
def test_it_is_the_last_block_that_runs(active):
    whole, short = both()
    whole.blocks.active = short.blocks.active = active
    assert_alike(whole, short)
    assert tokens_of_mlps(short) == [17] * (len(active) - 1) + [1]


def test_prompt_tokens_are_seen_and_not_returned():
    def prompt(net):
        net.blocks.prompt = nn.Parameter(torch.randn(4, WIDTH))

    whole, short = both(prompt)
    assert_alike(whole, short)
    assert tokens_of_mlps(short) == [21, 21, 1]
    with whole.blocks.use_prompt(None), short.blocks.use_prompt(None):
        assert_alike(whole, short)


def test_checkpointing_computes_the_same():
    whole, short = both()
    short.blocks.checkpointing = True
    assert_alike(whole, short)
    assert tokens_of_mlps(short) == [17, 17, 1]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.usefixtures("one_thread")
def test_with_dropout_the_whole_block_is_computed_and_draws_the_same_numbers(training):
    whole, short = (net.train(training) for net in both(proj_drop_rate=0.3, attn_drop_rate=0.3))
    assert_alike(whole, short)
    if training:
        assert all(torch.equal(a, b) for a, b in zip(passed(whole), passed(short), strict=True))
    assert tokens_of_mlps(short) == [17, 17, 17 if training else 1]


def test_tokens_that_are_read_are_computed():
    _, short = both()
    with short.blocks.record_tokens([2]) as tokens:
        assert tokens_of_mlps(short) == [17] * 3
    assert tokens[2].shape == (2, 17, WIDTH)
    with short.blocks.record_tokens([1]):
        assert tokens_of_mlps(short) == [17, 17, 1]
    with short.blocks.use_change(lambda block, run, j, x, *ends: run(x)):
        assert tokens_of_mlps(short) == [17] * 3


def hooked_before(net):
    net.blocks.get_submodule("2").attn.register_forward_pre_hook(lambda layer, inputs: None)


def hooked_after(net):
    net.blocks.get_submodule("2").register_forward_hook(lambda layer, inputs, output: None)


def step_by_step(net):
    net.blocks.get_submodule("2").attn.fused_attn = False


@pytest.mark.parametrize("change", [hooked_before, hooked_after, step_by_step])
@pytest.mark.usefixtures("one_thread")
def test_a_block_that_is_watched_or_computed_otherwise_is_computed_whole(change):
    whole, short = both(change)
    assert tokens_of_mlps(short) == [17] * 3
    assert all(torch.equal(a, b) for a, b in zip(passed(whole), passed(short), strict=True))


def test_masks_are_respected():
    whole, short = both()
    mask = torch.zeros(17, 17).masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf)
    masked = [passed(net, attn_mask=mask) for net in (whole, short)]
    assert all(torch.equal(a, b) for a, b in zip(*masked, strict=True))
    assert not torch.allclose(masked[0][0], passed(whole)[0])


@pytest.mark.parametrize("options", [{"global_pool": "avg"}, {"global_pool": "map", "class_token": False}])
def test_features_made_from_all_tokens_stay(options):
    _, short = both(**options)
    assert short.blocks.first_token is None


def test_second_derivatives_exist_where_they_do_in_torch():
    _, short = both()
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):
        (first,) = torch.autograd.grad(short(x).sin().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.abs().sum() > 0


@pytest.mark.parametrize("train", [TrainConfig(), TrainConfig(compile=True)], ids=["as it is", "compiled"])
def test_client_actors_use_it_unless_the_network_is_compiled(train, monkeypatch):
    monkeypatch.setattr("rayfed.executors.worker.use_compile", lambda model, device: None)
    net = network()
    adjust_trunk(net, train)
    assert (net.blocks.first_token is None) == train.compile
