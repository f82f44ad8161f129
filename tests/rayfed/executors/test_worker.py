"""What every process that runs clients builds from the same description."""

from pathlib import Path

from rayfed.executors.worker import ClientContext
from rayfed.federation.train_config import TrainConfig
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.head import Head


def test_a_process_normalises_as_the_chosen_weights_need_it():
    # The first weights of this model, OpenAI's, have another mean; those of LAION were trained with 0.5.
    model = ModelConfig(name="open_clip/ViT-L-14", pretrained="laion2b_s32b_b82k")
    context = ClientContext(
        seed=0,
        model=model,
        construct=build_backbone,
        tuning=Head(),
        num_classes=2,
        train=TrainConfig(),
        shard=Path(),
        splits={},
    )
    assert context.skeleton().mean == (0.5, 0.5, 0.5)
