"""A vision model of Hugging Face, with LoRA on queries and values."""

import numpy as np
from transformers import ViTConfig, ViTForImageClassification

import rayfed

rng = np.random.default_rng(0)
size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def network():
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=3, **size))


labels = {f"clinic {i}": rng.integers(0, 3, 24) for i in range(3)}
data = {name: (rng.normal(y[:, None, None, None], 1, (24, 3, 32, 32)), y) for name, y in labels.items()}
tuning = rayfed.LoRA(rank=4, targets=["query", "value", "q_proj", "v_proj"])
experiment = rayfed.Experiment(model=network, data=data, tuning=tuning, rounds=2)
