"""torchvision's ResNet-18 with LoRA on convolutions, on images as arrays."""

import numpy as np
import torchvision

import rayfed

rng = np.random.default_rng(0)


def hospital(brightness):
    labels = rng.integers(0, 3, 24)
    images = rng.normal(brightness + 60 * labels[:, None, None, None], 40, (24, 3, 32, 32))
    return images.clip(0, 255).astype(np.uint8), labels


experiment = rayfed.Experiment(
    model=torchvision.models.resnet18(num_classes=3),
    data={"north": hospital(30), "south": hospital(50), "east": hospital(70)},
    tuning=rayfed.LoRA(rank=4, targets=r"layer[34]\.\d\.conv2"),
    rounds=2,
)
