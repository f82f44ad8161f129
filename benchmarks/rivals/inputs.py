"""Writes the inputs of a row: examples, first values, and the order of the examples of every client.

The order is that which RayFed draws, and the first values of LoRA and of the head are those with which RayFed
begins. The other programs get both as files, so that all train the same batches from the same values.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.rivals.common_names import peft_names
from benchmarks.rivals.programs.with_rayfed import experiment
from benchmarks.rivals.workloads import (
    COHORTS,
    FROZEN,
    IMAGES,
    LABELS,
    MODEL,
    ORDERS,
    START,
    TEXTS,
    WHOLE,
    Work,
    arrays,
    names_of_clients,
    vision_transformer,
    write,
)  # fmt: skip
from rayfed.experiment.plan import make_plan
from rayfed.seeds import cpu_seeded, derive, use_seed

SEED = 0


def write_inputs(folder: Path, work: Work, texts: Path, model: Path) -> None:
    """Write everything that the programs read.

    Args:
        texts: `train.csv` of BANKING77.
        model: Folder of MiniLM-L6 with its tokenizer.
    """
    folder.mkdir(parents=True)
    write(folder, work)
    rng = np.random.default_rng(SEED)
    cohorts = np.stack([rng.permutation(work.clients)[: work.cohort] for _ in range(work.rounds)])
    if work.cohort == work.clients:
        cohorts = np.tile(np.arange(work.clients), (work.rounds, 1))
    np.save(folder / COHORTS, cohorts)
    if work.is_text:
        write_texts(folder, work, texts)
        shutil.copytree(model, folder / MODEL)
        without_dropout(folder / MODEL / "config.json")
    else:
        write_images(folder, work, rng)
    with cpu_seeded(SEED):
        if work.name == "vit":
            save_file(vision_transformer(work).state_dict(), folder / FROZEN)
        if work.name in WHOLE:
            np.savez(folder / START, **arrays(WHOLE[work.name]()))
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        setup = make_plan(experiment(folder, 1, Path(name) / "cache").config(output=str(run)), run).setup
        assert setup is not None
        clients, seed = list(setup.experiment.clients), setup.experiment.seed
        if work.name not in WHOLE:
            np.savez(folder / START, **peft_names(work, setup.start))
    np.save(folder / ORDERS, orders(work, cohorts, clients, seed))


def orders(work: Work, cohorts: Any, clients: list[str], seed: int) -> Any:
    """The order of the examples in each pass, as RayFed draws it.

    Args:
        cohorts: Numbers of the clients of each round, shape (rounds, cohort).
        clients: Ids of all clients.

    Returns:
        int16, shape (rounds, cohort, epochs, examples).
    """
    drawn = np.zeros((*cohorts.shape, work.epochs, work.examples), np.int16)
    for round, cohort in enumerate(cohorts):
        for place, client in enumerate(cohort):
            with use_seed(derive(seed, "fit", round, clients[client])) as stream:
                for epoch in range(work.epochs):
                    drawn[round, place, epoch] = torch.randperm(work.examples, generator=stream).numpy()
    return drawn


def without_dropout(config: Path) -> None:
    """Set all dropouts of a BERT to 0, because no two programs share its masks. Args: config: its file."""
    settings = json.loads(config.read_text())
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout")
    config.write_text(json.dumps(settings | dict.fromkeys(names, 0.0)))


def write_images(folder: Path, work: Work, rng: np.random.Generator) -> None:
    """Noise on a picture of each class, so that there is something to learn."""
    shape = (work.size, work.size, 3)
    pictures = rng.integers(64, 192, (work.classes, *shape))
    labels = rng.integers(0, work.classes, (work.clients, work.examples))
    images = np.empty((*labels.shape, *shape), np.uint8)
    for k, own in enumerate(labels):
        images[k] = np.clip(pictures[own] + rng.integers(-64, 64, (len(own), *shape)), 0, 255)
    np.save(folder / IMAGES, images)
    np.save(folder / LABELS, labels)


def write_texts(folder: Path, work: Work, source: Path) -> None:
    """Questions of BANKING77, of all intents."""
    with source.open(newline="") as file:
        rows = [*csv.reader(file)][1:]
    random.Random(SEED).shuffle(rows)
    first = {row[1]: row for row in rows}
    wanted = work.clients * work.examples
    chosen = [*first.values(), *(row for row in rows if first[row[1]] is not row)][:wanted]
    random.Random(SEED + 1).shuffle(chosen)
    names = names_of_clients(work)
    with (folder / TEXTS).open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["text", "label", "client"])
        out.writerows([text, label, names[i // work.examples]] for i, (text, label) in enumerate(chosen))
    classes = sorted({label for _, label in chosen})
    labels = np.array([classes.index(label) for _, label in chosen])
    np.save(folder / LABELS, labels.reshape(work.clients, work.examples))
