"""pFedMMA: its adapters block by block, their gradients, what stays at the client, and its reduction."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import apply_tuning, trainable
from rayfed.tuning.multimodal_adapter import MultimodalAdapter
from rayfed.tuning.text_prompt import TextPrompt
from tests.algorithms.test_fedpgp import FEW, NAMES
from tests.rayfed.models.small import images
from tests.rounding import equally_near, exactly

FOUR = ModelConfig(name="clip_mini", pretrained=False, options={"depth": 4})


def tuned(tuning, config=FOUR):
    return apply_tuning(build_backbone(config, NAMES, 0), tuning, 0).eval()


def scores(model, x, scale):
    """The scores of the model, with adapters in the last two blocks of both towers, written out."""
    adapters = model.net.paired

    def through(tokens, blocks, ends, **options):
        for j, block in enumerate(blocks):
            before = tokens
            tokens = block(tokens, **options)
            place = j - (len(blocks) - 2)
            if place >= 0:
                own, shared = ends[place], adapters.shared[place]
                low = torch.relu(own.down(block.ln_1(before)))
                tokens = tokens + scale * own.up(torch.relu(shared(low)))
        return tokens

    visual, tower, words = model.net.visual, model.text.tower, model.text.tokens
    blocks = [visual.transformer.resblocks.get_submodule(str(j)) for j in range(4)]
    pictures = visual.ln_post(through(visual._embeds(x), blocks, adapters.image)[:, 0]) @ visual.proj
    embedded = tower.token_embedding(words) + tower.positional_embedding
    tokens = through(embedded, tower.transformer.resblocks, adapters.text, attn_mask=tower.attn_mask)
    texts = tower.ln_final(tokens)[torch.arange(3), words.argmax(-1)] @ tower.text_projection
    unit = [t / t.norm(dim=1, keepdim=True) for t in (pictures, texts)]
    return model.head.scale * unit[0] @ unit[1].T


def test_adapters_are_beside_the_last_blocks_and_learn_as_without_the_factor():
    model, x, y = tuned(MultimodalAdapter(blocks=2, hidden=5, scale=0.1)), images(3), torch.tensor([0, 2, 1])
    output, expected = model(x), scores(model, x, 0.1)
    live = trainable(model)
    found = torch.autograd.grad(cross_entropy(output, y), live.values())
    true = torch.autograd.grad(cross_entropy(expected, y), live.values())
    assert all(ours.abs().sum() > 0 for ours in found)

    def judge(model, x):
        result = scores(model, x, 0.1)
        return result, torch.autograd.grad(cross_entropy(result, y), trainable(model).values())

    exact, slopes = exactly(judge, model, x)
    equally_near([expected], [output], [exact])
    equally_near(
        *(
            dict(zip(live, [g * k for g in each], strict=True))
            for each, k in ((true, 10), (found, 1), (slopes, 10))
        )
    )


@torch.no_grad()
def test_without_the_tuning_it_scores_as_clip():
    model, plain, x = tuned(MultimodalAdapter(scale=1.0)), tuned(TextPrompt()), images(2)
    assert len(model.net.paired.shared) == 3  # the text tower has three blocks
    before = model(x)
    model.untuned = plain.untuned = True
    assert torch.equal(model(x), plain(x))
    assert not torch.allclose(before, plain(x), atol=1e-2)


@pytest.mark.slow
@pytest.mark.steady
def test_the_common_layers_travel_and_the_others_stay(short):
    own = short("pfedmma", *FEW, "train.lr=0.5", "tuning.hidden=4")
    assert {name.split(".")[1] for name in own.params} == {"shared"}
    sent = 2 * 4 * 2 * (4 * 4 + 4)
    assert own.history["bytes_up"].tolist() == [sent, sent]
    averaged = short("pfedmma", *FEW, "train.lr=0.5", "tuning.hidden=4", "local.stays=[]")
    options = ("model=clip_mini", "tuning=multimodal_adapter", "tuning.hidden=4")
    assert averaged.sha256 == short("fedavg", *FEW, "train.lr=0.5", *options).sha256
    assert averaged.history["loss"].tolist() != own.history["loss"].tolist()


def test_size_for_clip():
    with torch.device("meta"):
        big = tuned(MultimodalAdapter(), ModelConfig(name="open_clip/ViT-B-16-quickgelu", pretrained=False))
    live = trainable(big)
    towers = 768 * 32 + 32 + 32 * 768 + 768 + 512 * 32 + 32 + 32 * 512 + 512
    assert sum(p.numel() for p in live.values()) == 8 * (towers + 32 * 32 + 32)
    assert sum(p.numel() for n, p in live.items() if ".shared." in n) == 8 * 1056
