"""What Prometheus would scrape of a run is what the run wrote down."""

import json
import re
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager

import pytest
import torch

from rayfed.config.schema import load_config
from rayfed.engine.session import launch
from rayfed.experiment.plan import prepared
from rayfed.federation.executor import CallTiming
from tests.conftest import ROOT
from tests.rounding import near

BOARD = ROOT / "monitoring" / "grafana" / "boards" / "rayfed.json"

ONLY_ON_GPU = {"rayfed_actor_gpu_bytes", "rayfed_actor_gpu_peak_bytes"}


def scrape():
    """Samples of this node's export port: (name, labels) to value, of our metrics and of Ray's tasks."""
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


@contextmanager
def scraping():
    """Scrapes every second as long as this lasts; yields what was ever there."""
    ended, seen = threading.Event(), {}

    def go_on():
        while not ended.wait(1):
            seen.update(scrape())

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def queried():
    """Metrics and labels of every query of the board."""
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel["targets"]:
            labels = re.findall(r"by \(([^)]*)\)", target["expr"])
            labels += re.findall(r"[{,](\w+)=", target["expr"])
            for name in re.findall(r"ray_rayfed_\w+", target["expr"]):
                yield name, {label.strip() for some in labels for label in some.split(",")}


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
@pytest.mark.slow
@pytest.mark.steady
def test_scraped_values_are_those_of_the_run_and_clients_make_no_series(tmp_path, cache, ray_cluster):
    """Ten clients and a thousand."""
    options = ["algorithm=fedgr", "rounds=3", "clients_per_round=10", "data.partition.scheme=by_domain"]
    options += [f"data.cache={cache}", "model.options={depth: 1}", "model.pretrained=false"]
    options += ["evaluation.every=3", "evaluation.validation=true", "cluster.actors=1"]
    held, runs, paths = ExitStack(), [], [tmp_path / "few", tmp_path / "many"]
    for path, clients in zip(paths, (2, 200), strict=True):
        config = load_config([*options, f"data.partition.clients_per_domain={clients}"])
        (path / "model").mkdir(parents=True)
        runs.append(held.enter_context(launch(prepared(config), path)))
    try:
        rows = [[next(run) for _ in range(3)] for run in runs]
        asked = {name for name, _ in queried()} - {f"ray_{name}" for name in ONLY_ON_GPU}
        deadline, few, many = time.monotonic() + 300, {}, {}
        while time.monotonic() < deadline:  # Ray reports now and then
            found = scrape()
            few.update(of_run(found, "few"))  # on a busy machine a report may be late, and a gauge missing
            many.update(of_run(found, "many"))
            up = all(any(k[0] == "ray_rayfed_round" and v == 3 for k, v in m.items()) for m in (few, many))
            if up and few.keys() == many.keys() and asked <= {key[0] for key in many}:
                break
            time.sleep(1)
    finally:
        held.close()
    assert few.keys() == many.keys()
    tasks = {dict(labels)["Name"] for name, labels in found if name == "ray_tasks"}
    assert {"fit", "report"} <= tasks
    own = {n for n in tasks if not re.match("rayfed:clients:(?!few:|many:)", n)}  # of these runs
    assert not [name for name in own if "-plain" in name]  # Ray would keep series for each
    assert asked <= {key[0] for key in many}
    check_values(many, paths[1], rows[1])


def check_values(found, path, rows):
    from rayfed.executors import prometheus

    last = json.loads((path / "rounds.jsonl").read_text().splitlines()[-1])
    run = ("algorithm=fedgr", "trial=none")
    for column, name in prometheus.COLUMNS.items():
        near(found[f"ray_{name}", *run], last[column], 1, precision=torch.float64)
    for direction in ("up", "down"):
        total = sum(row[f"bytes_{direction}"] for row in rows)
        assert found[f"ray_rayfed_bytes_{direction}", *run] == total
    score = found["ray_rayfed_score", "split=test", f"domain={last['worst_domain']}", *run]
    assert score == pytest.approx(last["worst_domain_accuracy"])
    assert found["ray_rayfed_score", "split=test", "domain=all", *run] == pytest.approx(last["accuracy"])
    assert found["ray_rayfed_loss", "split=test", "domain=all", *run] == pytest.approx(last["loss"])
    assert found["ray_rayfed_score", "split=val", "domain=all", *run] == pytest.approx(last["val_accuracy"])
    assert found["ray_rayfed_loss", "split=val", "domain=all", *run] == pytest.approx(last["val_loss"])
    assert found["ray_rayfed_actors", *run] == 1
    assert 0 < found["ray_rayfed_idle_share", *run] < 1
    assert 0 < found["ray_rayfed_actor_uss_bytes", *run] < found["ray_rayfed_actor_rss_bytes", *run]
    assert found["ray_rayfed_visit_seconds_count", *run] > 3 * last["clients"]  # they are scored, too
    assert 0 < found["ray_rayfed_weight_min", *run] <= found["ray_rayfed_weight_max", *run] < 1


def test_the_board_asks_for_metrics_and_labels_that_there_are():
    from rayfed.executors import prometheus

    labels = {
        name: set(prometheus.RUN) for name in (*prometheus.ROUND, *prometheus.COUNTS, *prometheus.MEMORY)
    }
    labels |= {name: set(prometheus.SCORED) for name in prometheus.SCORES}
    labels[f"{prometheus.VISIT}_bucket"] = {*prometheus.RUN, "le"}
    asked = list(queried())
    for name, used in asked:
        assert used <= labels[name.removeprefix("ray_")], name
    assert {name for name, _ in asked} == {f"ray_{name}" for name in labels}  # nothing is left out


def test_prometheus_leaves_out_tasks_named_after_actors():
    """Ray makes a series of every name of a task."""
    import yaml

    (job,) = yaml.safe_load((ROOT / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    (rule,) = job["metric_relabel_configs"]
    assert rule["action"] == "drop"
    dropped = ("rayfed:driver:mine", "rayfed:clients:mine:00", "rayfed:clients:mine:c3-plain+2")
    for name in (*dropped, "fit", "report", "DriverActor.rounds"):
        assert bool(re.fullmatch(rule["regex"], f"ray_tasks;{name}")) is (name in dropped)


def test_gauges_keep_their_values_as_long_as_somebody_holds_them(monkeypatch):
    """Ray forgets a gauge that nobody sets, and a round may take an hour."""
    import gc
    import weakref

    from rayfed.executors import prometheus

    seen = []

    class Gauge:
        def __init__(self, name, *_):
            self.name = name

        def set(self, value, tags):
            seen.append((self.name, value, tags))

    monkeypatch.setattr(prometheus.ray_metrics, "Gauge", Gauge)
    monkeypatch.setattr(prometheus, "REPEAT_PAUSE", 0.01)
    held = prometheus.Gauges({"a": "", "b": ""}, ("run", "domain"), {"run": "x"})
    held.set("a", 1.0, domain="street")
    held.set("a", 2.0, domain="street")
    seen.clear()
    deadline = time.monotonic() + 120
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(seen) >= 3
    assert all(told == ("a", 2.0, {"run": "x", "domain": "street"}) for told in seen)
    gone = weakref.ref(held)
    del held
    gc.collect()
    while gone() is not None:  # the thread that repeats may hold it for a moment
        assert time.monotonic() < deadline
        time.sleep(0.01)
    seen.clear()
    prometheus._repeat_all()
    assert not seen


def test_shares_of_a_round():
    from rayfed.executors.prometheus import shares

    visits = [CallTiming("a", "fit", 2.0, 1.0), CallTiming("b", "fit", 1.0)]
    assert shares(visits, 2, 3.0) == {"rayfed_idle_share": 0.5, "rayfed_queue_share": 0.25}
    assert shares([], 2, 3.0) == {"rayfed_idle_share": 1.0, "rayfed_queue_share": 0.0}
