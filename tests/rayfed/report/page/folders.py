"""Writes folders of runs with all tables that the page reads, through the writers of real runs."""

import functools
import json

import numpy as np
import pyarrow as pa
import torch
import yaml

from rayfed.config.schema import load_config, to_dict
from rayfed.data.partition.manifest import META
from rayfed.evaluation.metrics import Evaluation, Round, Score, pool, summary
from rayfed.federation.cohort import Ledger
from rayfed.federation.executor import Event
from rayfed.record.atomic_files import write_table
from rayfed.record.folder import RunFolder, describe_run
from rayfed.types import ServerState

DOMAINS = ("street", "plain", "fonts")
"""In the order of the data set, which is not that of the alphabet."""
CLASSES = ("zero", "one", "two", "three")


@functools.cache
def config_of(method):
    return to_dict(load_config([f"algorithm={method}", "cluster=inline"]))


def write(
    path,
    *,
    method="fedgcr",
    seed=0,
    clients=12,
    rounds=4,
    each=8,
    every=1,
    held_out=None,
    events=(),
    finish=True,
    shared_tests=False,
):
    """A run with `clients` clients, of which all take part; `every`: rounds between evaluations.

    With `shared_tests` the clients of a domain have one test set, and so one score of the global model.

    Returns:
        Score of each client by round, shape (rounds, clients); 0 for rounds without an evaluation.
    """
    path.mkdir(parents=True)
    rng = np.random.default_rng([seed, len(method)])
    seen = [d for d in DOMAINS if d != held_out]
    own = {f"c{i:05}": seen[i % len(seen)] for i in range(clients)}
    config = json.loads(json.dumps(config_of(method)))
    config |= {"seed": seed, "rounds": rounds}
    config["data"]["held_out"] = held_out
    facts = {
        "examples": "images",
        "task": "classification",
        "commands": [f"python -m rayfed.run seed={seed}"],
    }
    describe_run(path, config, facts)
    write_table(path / "partition.parquet", manifest(own, each, held_out, shared_tests))
    folder = RunFolder(path, own, tensorboard=False)
    folder.begin()
    history = np.zeros((rounds, clients))
    for number in range(1, rounds + 1):
        scored = number % every == 0 or number == rounds
        if scored:
            history[number - 1] = np.clip(0.5 + 0.02 * number + 0.1 * rng.standard_normal(clients), 0, 1)
            if shared_tests:
                history[number - 1] = history[number - 1][np.arange(clients) % len(seen)]
        folder.add(a_round(number, own, history[number - 1] if scored else None, held_out, rng))
    for event in events:
        folder.event(Event(**event))
    if finish:
        folder.finish({"w": torch.full((2,), float(seed))})
    return history


def manifest(own, each, held_out, shared_tests=False):
    """`each` training images and two test images of every client, whose classes differ."""
    rows = {"index": [], "label": [], "domain": [], "client": [], "split": []}

    def add(domain, client, split, count):
        for k in range(count):
            place = len(rows["index"])
            rows["index"].append(10**7 * DOMAINS.index(domain) + place)
            rows["label"].append((k * (1 + len(client)) + place // 7) % len(CLASSES))
            rows["domain"].append(domain)
            rows["client"].append(client)
            rows["split"].append(split)

    for number, (client, domain) in enumerate(own.items()):
        add(domain, client, "train", each + number % 3)
        if not shared_tests:
            add(domain, client, "test", 2)
    for domain in dict.fromkeys(own.values()) if shared_tests else ():
        add(domain, "", "test", 2)
    if held_out:
        add(held_out, "", "held_out", 5)
    return pa.table(rows).replace_schema_metadata({META: json.dumps({"classes": CLASSES})})


def a_round(number, own, values, held_out, rng):
    ledger = Ledger()
    ledger.transfers = [
        {"exchange": tag, "client": cid, "down": 1000 * (1 + i % 3), "up": 500}
        for tag in ("fit", "evaluate")
        for i, cid in enumerate(own)
    ]
    weights = rng.dirichlet(np.ones(len(own)))
    ledger.tables = {
        "aggregation": [{"client": c, "weight": float(w)} for c, w in zip(own, weights, strict=True)],
        "clusters": [{"client": c, "cluster": i % 3, "domain": d} for i, (c, d) in enumerate(own.items())],
        "allocations": [{"client": c, "blocks": list(range(1 + i % 3))} for i, c in enumerate(own)],
        "gaps": [{"client": c, "model": "gap", "gap": float(w)} for c, w in zip(own, weights, strict=True)],
    }
    row = {"round": number, "beta": 0.1 * number}
    scores = {}
    if values is not None:
        by_client = {
            c: Score(value=float(v), loss=float(2 - v), num=2) for c, v in zip(own, values, strict=True)
        }
        by_domain = {d: pool([by_client[c] for c in own if own[c] == d]) for d in dict.fromkeys(own.values())}
        unseen = {held_out: Score(value=0.4 + 0.01 * number, loss=1.5, num=5)} if held_out else {}
        scores["global"] = Evaluation(clients=by_client, domains=by_domain, held_out=unseen)
        row |= summary(scores["global"]) | {"val_accuracy": 0.6 - 0.05 * abs(number - 2), "val_loss": 1.0}
    row |= {"clients": len(own), "bytes_up": ledger.total("up"), "bytes_down": ledger.total("down")}
    row |= {"flops": 10**9 * number, "trained_params": 650}
    row |= {"local_steps": 30, "local_examples": 400}
    row |= {"seconds": 2.0, "seconds_training": 1.5, "seconds_clients": 3.0, "seconds_idle": 1.0}
    return Round(state=ServerState(params={}, round=number), row=row, ledger=ledger, scores=scores)


def write_study(path, protocol, methods, parts, seed=0, **of_part):
    """The folder of a study of a protocol.

    Args:
        path: The folder.
        protocol: The protocol.
        methods: Its methods.
        parts: Its parts.
        seed: The seed of all runs.
        of_part: Values of `write` by name, of each the function that gives it for a part.
    """
    cells = []
    for method in methods:
        for part in parts:
            folder = f"cells/{method}-{part}-seed{seed}"
            values = {name: value(part) for name, value in of_part.items()}
            write(path / folder, method=method, seed=seed, **values)
            at = {"method": method, "part": part, "seed": seed}
            cells.append({"coordinates": at, "label": method, "folder": folder})
    reported = "validation" if protocol == "leave_one_out" else "last"
    tree = {"names": ["method", "part", "seed"], "protocol": protocol, "reported": reported, "cells": cells}
    (path / "study.json").write_text(json.dumps(tree))
    return path


def write_folds(path, methods=("fft_gp", "fedavg"), seed=0):
    """The folder of leave_one_out with the domains `plain` and `fonts` held out in turn."""
    domains = ("plain", "fonts")
    return write_study(path, "leave_one_out", methods, domains, seed, held_out=lambda part: part)


def write_sweep(path, trials=3, seeds=(0, 1)):
    """The folder of a sweep over server.q."""
    cells = []
    for trial in range(trials):
        q = 0.1 + trial
        for seed in seeds:
            folder = f"cells/server.q={q}-seed{seed}"
            write(path / folder, seed=seed, rounds=2)
            config = yaml.safe_load((path / folder / "config.yaml").read_text())
            config["server"]["q"] = q
            (path / folder / "config.yaml").write_text(yaml.safe_dump(config))
            at = {"server.q": q, "seed": seed}
            cells.append({"coordinates": at, "label": f"server.q={q}", "folder": folder})
    rows = [
        {
            "number": t,
            "state": "finished" if t else "stopped early",
            "scores": {"val_accuracy": 0.5 + 0.1 * t} if t else {},
            "values": {"server.q": 0.1 + t},
            "error": "",
        }
        for t in range(trials)
    ]
    search = {"name": "q", "objectives": {"val_accuracy": "max"}, "space": {"server.q": ""}, "trials": rows}
    tree = {"names": ["server.q", "seed"], "protocol": "", "reported": "last", "cells": cells}
    tree["search"] = search
    (path / "study.json").write_text(json.dumps(tree))
    return path


def write_job(path, cells):
    """The folder of a reproduced table, as docs/many_runs.md describes it.

    Args:
        path: The folder.
        cells: Row, setting, seed and folder of a run, relative to the job or absolute, of every cell.
    """
    path.mkdir(parents=True, exist_ok=True)
    rows, settings, seeds = (list(dict.fromkeys(cell[i] for cell in cells)) for i in range(3))
    pairs = dict.fromkeys((setting, row) for row, setting, *_ in cells)
    tree = {
        "format": 1,
        "experiment": "fedgcr/table5",
        "scale": "mini",
        "reference": "cheng2024fedgcr",
        "where": "Table 5",
        "title": "Ablation",
        "overrides": [],
        "rows": rows,
        "settings": settings,
        "seeds": seeds,
        "measures": [{"name": "accuracy", "score": "accuracy_domain", "better": "higher", "unit": "%"}],
        "selection": "The last evaluated round.",
        "cells": [
            {
                "row": r,
                "setting": s,
                "seed": seed,
                "path": str(folder),
                "sha256": "0",
                "scores": {"accuracy": 50.0},
            }
            for r, s, seed, folder in cells
        ],
        "values": [
            {
                "setting": s,
                "row": r,
                "measure": "accuracy",
                "seeds": len(seeds),
                "mean": 51.25,
                "sd": None,
                "paper": 50.0,
                "paper_sd": None,
                "paper_setting": s,
                "difference": 1.25,
            }
            for s, r in pairs
        ],
        "claims": [
            {
                "setting": settings[0],
                "measure": "accuracy",
                "better": rows[0],
                "worse": rows[-1],
                "paper_difference": 2.0,
                "difference": 1.0,
                "seeds": 1,
                "p": None,
                "verdict": "not decided",
            }
        ],
        "notes": [],
    }
    (path / "reproduction.json").write_text(json.dumps(tree))
    return path
