"""A thousand clients from a table of pandas with the paths of their images, of which 20 train in a round."""

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image

import rayfed

rng = np.random.default_rng(0)
folder = Path(tempfile.mkdtemp())
for number in range(60):
    pixels = rng.integers(0, 100, (8, 8, 3)) + 50 * (number % 3)
    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
picked = rng.integers(0, 60, 3000)
paths = [str(folder / f"{number}.png") for number in picked]
table = pd.DataFrame({"path": paths, "label": picked % 3, "client": np.arange(3000) // 3})
cohort = {"clients_per_round": 20, "evaluation": {"clients": 50}}
experiment = rayfed.Experiment(model="vit_mini", data=table, tuning="head", rounds=2, **cohort)
