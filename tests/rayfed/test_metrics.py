"""What Prometheus would scrape of a run is what the run wrote down."""

import json
import time
import urllib.request

import pytest

from rayfed.cohort import Visit
from rayfed.config import load_config
from rayfed.launch import launch
from rayfed.setup import prepare
from tests.conftest import SMALL

ONLY_ON_GPU = {"rayfed_actor_gpu_bytes", "rayfed_actor_gpu_peak_bytes"}


def scrape():
    """Samples of this node's export port: (name, labels) to value, of our metrics only."""
    import ray
    from prometheus_client.parser import text_string_to_metric_families

    (node,) = ray.nodes()
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in families
        for s in family.samples
        if s.name.startswith(("ray_rayfed_", "ray_tasks"))
    }


def of_run(found, run):
    """Samples of one run by name and our own labels; fails where a gauge comes from two processes."""
    ours = ("split", "domain", "le", "algorithm", "trial")
    mine = {}
    for (name, labels), value in found.items():
        labels = dict(labels)
        if labels.get("run") == run:
            assert "client" not in labels
            mine[name, *(f"{k}={labels[k]}" for k in ours if k in labels)] = value
    return mine


@pytest.mark.ray
def test_scraped_values_are_those_of_the_run_and_clients_make_no_series(tmp_path, cache, ray_cluster):
    bare = [text for text in SMALL if not text.startswith("tuning.")]  # the method brings its own scheme
    options = [*bare, "rounds=3", "algorithm=fedgr", f"data.cache={cache}", "data.domains=[plain,street]"]
    runs, paths = [], [tmp_path / "few", tmp_path / "many"]
    for path, clients in zip(paths, (2, 5), strict=True):
        config = load_config([*options, f"data.partition.clients_per_domain={clients}", "cluster.actors=1"])
        (path / "model").mkdir(parents=True)
        runs.append(launch(prepare(config), config, path))
    try:
        rows = [[next(run) for _ in range(3)] for run in runs]
        deadline, few, many = time.monotonic() + 60, {}, {}
        while time.monotonic() < deadline:  # Ray reports every ten seconds
            found = scrape()
            few, many = of_run(found, "few"), of_run(found, "many")
            if all(any(key[0] == "ray_rayfed_round" and v == 3 for key, v in m.items()) for m in (few, many)):
                break
            time.sleep(1)
    finally:
        for run in runs:
            run.close()
    assert few.keys() == many.keys()
    check_values(many, paths[1], rows[1])


def check_values(found, path, rows):
    from rayfed.executors import metrics

    last = json.loads((path / "result.json").read_text().splitlines()[-1])
    run = ("algorithm=fedgr", "trial=none")
    for column, name in metrics.COLUMNS.items():
        assert found[f"ray_{name}", *run] == pytest.approx(last[column], rel=1e-6), name
    for direction in ("up", "down"):
        total = sum(row[f"bytes_{direction}"] for row in rows)
        assert found[f"ray_rayfed_bytes_{direction}_total", *run] == total
    score = found["ray_rayfed_score", "split=test", f"domain={last['worst_domain']}", *run]
    assert score == pytest.approx(last["worst_domain_accuracy"])
    assert found["ray_rayfed_score", "split=test", "domain=all", *run] == pytest.approx(last["accuracy"])
    assert found["ray_rayfed_loss", "split=test", "domain=all", *run] == pytest.approx(last["loss"])
    assert found["ray_rayfed_actors", *run] == 1
    assert 0 < found["ray_rayfed_idle_share", *run] < 1
    assert 0 < found["ray_rayfed_actor_uss_bytes", *run] < found["ray_rayfed_actor_rss_bytes", *run]
    assert found["ray_rayfed_visit_seconds_count", *run] > 3 * last["clients"]  # they are scored, too
    assert 0 < found["ray_rayfed_weight_min", *run] <= found["ray_rayfed_weight_max", *run] < 1


def test_shares_of_a_round():
    from rayfed.executors.metrics import shares

    visits = [Visit("a", "fit", 2.0, 1.0), Visit("b", "fit", 1.0)]
    assert shares(visits, 2, 3.0) == {"rayfed_idle_share": 0.5, "rayfed_queue_share": 0.25}
    assert shares([], 2, 3.0) == {"rayfed_idle_share": 1.0, "rayfed_queue_share": 0.0}
