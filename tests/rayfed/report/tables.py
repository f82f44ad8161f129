"""Writes the folder of a run with all tables that figures are drawn from, without running anything."""

import json

import numpy as np
import yaml

from rayfed.record.atomic_files import write_parquet, write_text

DOMAINS = ("plain", "inverted", "blended", "street", "fonts")
"""In the order of the data set, which is neither that of the alphabet nor that of the clients."""
HELD_OUT = "street"


def write_run(path, clients=11, rounds=5, seed=0, domains=DOMAINS):
    """A run in which one domain is held out and the clients of the others come in reverse order."""
    rng = np.random.default_rng(seed)
    path.mkdir(parents=True)
    seen = [d for d in reversed(domains) if d != HELD_OUT]
    own = {f"c{i:02}-{seen[i % len(seen)]}": seen[i % len(seen)] for i in range(clients)}
    data = {"name": "digits-five-mini"}
    config = {
        "algorithm": "fedgcr",
        "data": data,
        "rounds": rounds,
        "seed": seed,
    }
    write_text(path / "config.yaml", yaml.safe_dump(config))
    write_text(path / "environment.json", json.dumps({"task": "classification"}))
    write_parquet(path / "partition.parquet", manifest(own, rng, domains))
    write_rounds(path, rounds, rng)
    numbers = range(1, rounds + 1)
    tables = {
        "clients": [row for r in numbers for row in scores(r, own, rng, domains)],
        "aggregation": each(numbers, own, lambda i: {"weight": rng.uniform(0.05, 0.15)}),
        "clusters": each(
            numbers,
            own,
            lambda i: {"domain": "?", "cluster": i % 3, "representation": rng.normal(size=4).tolist()},
        ),
        "allocations": each(
            numbers, own, lambda i: {"blocks": sorted(rng.permutation(4)[: 1 + i % 4].tolist())}
        ),
        "samples": [
            {
                "round": rounds,
                "client": c,
                "domain": d,
                "label": k,
                "representation": rng.normal(size=4).tolist(),
            }
            for c, d in own.items()
            for k in range(10)
        ],
        "gaps": [
            {"round": r, "client": c, "model": m, "gap": rng.uniform()}
            for r in numbers
            for c in own
            for m in ("gap", "gap_ga")
        ],
        "landscape": surface(own, rng),
        "slopes": [
            {"client": c, "change": d, "gap": 1.0, "gap_change": -0.3 * d, "slope": -0.3, "rho": -0.98}
            for c in own
            for d in (-0.2, 0.0, 0.2)
        ],
        "features": [
            {"domain": d, "unseen": d == HELD_OUT, "x": x, "y": y, "features": [x, y]}
            for d in domains
            for x, y in rng.normal(size=(12, 2)).tolist()
        ],
    }
    for name, rows in tables.items():
        write_parquet(path / f"{name}.parquet", rows)
    return own


def each(numbers, own, row):
    return [{"round": r, "client": c, **row(i)} for r in numbers for i, c in enumerate(own)]


def manifest(own, rng, domains):
    rows = []
    for client, domain in own.items():
        start = 1000 * domains.index(domain)
        rows += [
            {
                "index": start + int(i),
                "label": int(rng.integers(10)),
                "domain": domain,
                "client": client,
                "split": s,
            }
            for i, s in zip(rng.permutation(900)[:30], ["train"] * 20 + ["val"] * 10, strict=True)
        ]
    return rows + [
        {"index": 1000 * domains.index(d) + 950 + i, "label": i, "domain": d, "client": "", "split": s}
        for d in domains
        for i, s in enumerate(["held_out" if d == HELD_OUT else "test"] * 10)
    ]


def scores(number, own, rng, domains):
    def row(exchange, client, domain, metric):
        value = rng.uniform(0, 1)
        return {
            "round": number,
            "exchange": exchange,
            "client": client,
            "domain": domain,
            "model": "global",
            "metric": metric,
            "value": value,
        }

    for metric in ("accuracy", "loss"):
        for client, domain in own.items():
            yield row("report_clients", client, domain, metric)
        for domain in domains:
            yield row("report_held_out" if domain == HELD_OUT else "report_domains", domain, domain, metric)


def write_rounds(path, rounds, rng):
    lines = [
        {
            "round": r + 1,
            "accuracy": 0.1 * r + rng.uniform(0, 0.1),
            "worst_domain_accuracy": 0.08 * r,
            "bytes_up": 10**6,
            "bytes_down": 3 * 10**6,
            "seconds": 2.0,
            "virtual_time": 7.0 * (r + 1),
        }
        for r in range(rounds)
    ]
    write_text(path / "rounds.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def surface(own, rng):
    rows = [
        {"kind": "client", "client": c, "x": x, "y": y}
        for c, (x, y) in zip(own, rng.normal(size=(len(own), 2)).tolist(), strict=True)
    ]
    axis = np.linspace(-4, 4, 5).tolist()
    rows += [{"kind": "grid", "client": "", "x": x, "y": y} for y in axis for x in axis]
    return [{**row, "loss": row["x"] ** 2 + row["y"] ** 2, "share": 0.7} for row in rows]
