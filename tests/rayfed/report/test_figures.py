"""Figures of finished runs: what is drawn, not how it looks."""

import warnings
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rayfed
from algorithms._gaps import variance
from algorithms.ga import adjusted_weights, step_at
from rayfed.errors import ConfigError
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.client_tasks import evaluate, fit
from rayfed.federation.executor import Call
from rayfed.record.atomic_files import write_parquet
from rayfed.record.readers import read_rows
from rayfed.record.recorded_run import RecordedRun
from rayfed.report import feature_map, landscape
from rayfed.report import feature_map as features
from rayfed.report import landscape as measured
from rayfed.report.method_figures import draw_partition, gap_variance, gap_variances
from rayfed.report.reopen import reopen
from tests.conftest import quickly
from tests.rounding import Exact, equally_near, exact_numbers, near
from tests.vectors import vector

V5 = vector("fedclip_fftgp", "V5")
FEW = ("data.limit=60", "data.val=6", "rounds=2", "cluster=inline", "compare=[]", "model.options={depth: 2}")


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache):
    """FFT-GP on a frozen CLIP model, four clients and an unseen domain, with all comparisons of weights."""
    folder = tmp_path_factory.mktemp("figures") / "run"
    domains = ("data.held_out=street",)
    method = ("algorithm=fft_gp_clip", "server.compare=true", "model.pretrained=false")
    rayfed.simulate([*method, *domains, *FEW, f"data.cache={cache}", f"output={folder}"])
    return folder


def test_variances_are_those_of_the_table(tmp_path):
    gaps = V5.inputs["cases"]["plain"][1]
    expected = V5.expected["variance"]
    rows = [
        {"round": r, "client": str(i), "model": name, "gap": gap * scale}
        for r in (2, 1)
        for name, scale in (("gap", 1.0), ("gap_faa", 0.1 * r))
        for i, gap in enumerate(gaps)
    ]
    rows += [
        {"round": 3, "client": str(i), "model": "gap", "gap": g} for i, g in enumerate((0.1, float("nan")))
    ]
    write_parquet(tmp_path / "gaps.parquet", rows)
    found = gap_variances(RecordedRun(tmp_path))
    assert found.keys() == {"gap", "gap_faa"}
    assert [number for number, _ in found["gap"]] == [1, 2]  # the unknown gap of round 3 is left out
    V5.matches([v for _, v in found["gap"]], [expected] * 2)
    V5.matches([v for _, v in found["gap_faa"]], [0.01 * expected, 0.04 * expected])
    assert gap_variance(RecordedRun(tmp_path / "nothing")) is None


@pytest.mark.slow
@pytest.mark.steady
def test_a_comparing_run_draws_all_three_servers(run):
    found = gap_variances(RecordedRun(run))
    rows = read_rows(run)
    assert found.keys() == {"gap", "gap_ga", "gap_fedavg", "gap_faa"}
    for name, points in found.items():
        assert [value for _, value in points] == pytest.approx([row[f"{name}_variance"] for row in rows])
        assert rows[0][f"{name}_population_variance"] == pytest.approx(points[0][1] / (2 * 4**2))
    pictures = {path.name for path in (run / "figures").iterdir()}
    assert {"gap_variance.png", "aggregation_weights.png", "accuracy.png"} <= pictures


@pytest.mark.parametrize("name", quickly(["ga", "faa"], ["faa"]))
def test_drawn_weights_are_those_used(small, name):
    """GA: uniform, then one step by the gaps of the round before; FAA: those it found."""
    folder = small(f"algorithm={name}", "data.val=6", "figures=true").path
    rows = pq.read_table(folder / "aggregation.parquet").to_pandas()
    weights = rows.pivot(index="round", columns="client", values="weight")
    assert (folder / "figures" / "aggregation_weights.png").exists()
    if name == "ga":
        near(weights.loc[1], np.full(5, 1 / 5), 5 + 3, precision=torch.float64)
        gaps = (
            pq.read_table(folder / "gaps.parquet")
            .to_pandas()
            .pivot(index="round", columns="client", values="gap")
        )
        step = step_at(1, 2, 0.2)
        adjusted = adjusted_weights([1 / 5] * 5, gaps.loc[1].to_numpy(), step)
        near(weights.loc[2], adjusted, 4 * 5, size=1.0, precision=torch.float64)
        assert variance(gaps.loc[1].to_numpy()) == pytest.approx(read_rows(folder)[0]["gap_variance"])
    else:
        found = pq.read_table(folder / "fairness.parquet").to_pandas()
        used = found.pivot(index="round", columns="client", values="weight")
        near(weights, used, 5 + 3, precision=torch.float64)
        assert np.ptp(weights.to_numpy()) > 0


def models(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (4, 3), "n.running_var": (2,), "b": (5,)}
    return [
        {n: torch.rand(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
        for _ in range(count)
    ]


def flat(params):
    return torch.cat([params["a"].flatten(), params["b"]]).numpy()


def test_three_models_lie_in_their_plane_at_their_distances():
    three = models(3)
    centre = {n: 0.5 * three[0][n] + 0.3 * three[1][n] + 0.2 * three[2][n] for n in three[0]}
    plane = measured.plane_through(centre, three)
    assert plane.share == pytest.approx(1)
    for (x, y), model in zip(plane.places, three, strict=True):
        found = plane.at(x, y)
        for name, value in model.items():  # statistics too
            near(
                found[name], value, 17 * 10, size=1.0, precision=torch.float64
            )  # decompositions of 17 numbers
        assert np.hypot(x, y) == pytest.approx(np.linalg.norm(flat(model) - flat(centre)))
    apart = np.linalg.norm(plane.places[0] - plane.places[1])
    assert apart == pytest.approx(np.linalg.norm(flat(three[0]) - flat(three[1])))
    far = plane.at(*(100 * plane.places[0]))
    assert (far["n.running_var"] >= 0).all()
    with pytest.raises(ConfigError, match="2 clients do not span a plane"):
        measured.plane_through({n: (three[0][n] + three[1][n]) / 2 for n in centre}, three[:2])


def test_the_grid_has_the_losses_of_its_points():
    """A quadratic loss, whose values follow from explicit axes; five models do not lie in one plane."""
    five = models(5)
    target = flat(models(1, seed=1)[0])
    centre = {n: sum(m[n] for m in five) / 5 for n in five[0]}
    plane = measured.plane_through(centre, five)
    moves = np.stack([flat(m) - flat(centre) for m in five])
    sizes, axes = np.linalg.svd(moves)[1:]
    assert plane.share == pytest.approx((sizes[:2] ** 2).sum() / (sizes**2).sum())
    turned = {"roundings": 17 * 10, "size": sizes[0] / (sizes[1] - sizes[2]), "precision": torch.float64}
    near(np.abs(plane.places), np.abs(moves @ axes[:2].T), **turned)
    axes = plane.mix @ moves
    near(axes @ axes.T, np.eye(2), **turned)

    def loss(params):
        return float(((flat(params) - target) ** 2).sum())

    rows = measured.losses(plane, list("abcde"), 4, loss)
    assert [row["kind"] for row in rows] == ["global"] + ["client"] * 5 + ["grid"] * 16
    for row, model in zip(rows[1:6], five, strict=True):
        assert row["loss"] == pytest.approx(loss(model))
    for row in rows[6:]:
        point = flat(centre) + row["x"] * axes[0] + row["y"] * axes[1]
        assert row["loss"] == pytest.approx(((point - target) ** 2).sum())
    xs, ys, z = landscape.surface(rows)
    assert z.shape == (4, 4)
    assert z[1, 2] == next(r["loss"] for r in rows[6:] if r["x"] == xs[2] and r["y"] == ys[1])
    low = plane.places.min(0)
    high = plane.places.max(0)
    assert xs[-1] - high[0] == pytest.approx(0.5 * (high[0] - low[0]))


def test_landscape_of_a_finished_run(run):
    """One command; the losses are those of the unseen domain, and clients' models lie in the plane."""
    assert landscape.main([str(run), "--points", "3", "--images", "20"]) == 0
    rows = pq.read_table(run / "landscape.parquet").to_pylist()
    assert [row["kind"] for row in rows] == ["global"] + ["client"] * 4 + ["grid"] * 9
    assert 0.5 < rows[0]["share"] <= 1  # two of three directions in which four models and their mean differ
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert "](figures/landscape.png)" in (run / "report.md").read_text()
    # The same from the parts: train the first client once more and score it on the unseen domain.
    opened = reopen(run)
    executor = InlineExecutor(opened.setup.context, opened.setup.weights)
    local = opened.setup.experiment.local
    sent = opened.state.broadcast()
    updates = executor.map(
        [Call(client, partial(fit, local=local), "fit", sent) for client in opened.setup.experiment.clients]
    )
    task = partial(evaluate, split="test", local=local)
    whole = [opened.state.broadcast(params={**opened.state.params, **update.params}) for update in updates]
    calls = [Call("domain:street", task, f"x{n}", given) for n, given in enumerate(whole)]
    judge = Exact(opened.setup.context, opened.setup.weights)
    alone, exact = ([answer.metrics["loss"] for answer in each.map(calls)] for each in (executor, judge))
    everything = measured.survey(run, 2, 10_000)
    found = [row["loss"] for row in everything if row["kind"] == "client"]
    equally_near(*([torch.tensor(each).double()] for each in (alone, found, exact)))
    scored = pq.read_table(run / "aggregation.parquet").to_pylist()
    assert measured.last_weights(scored) == {r["client"]: r["weight"] for r in scored if r["round"] == 2}


def test_features_of_seen_and_unseen_domains(run):
    assert feature_map.main([str(run), "--images", "60"]) == 0
    rows = pq.read_table(run / "features.parquet").to_pylist()
    counts = {d: sum(r["domain"] == d for r in rows) for d in ("plain", "inverted", "blended", "fonts")}
    assert counts == dict.fromkeys(counts, 15)
    assert sum(row["domain"] == "street" for row in rows) == 60
    assert {row["domain"] for row in rows if row["unseen"]} == {"street"}
    assert "](figures/feature_map.png)" in (run / "report.md").read_text()
    opened = reopen(run)
    context = opened.setup.context
    tensors = opened.setup.weights
    worker = InlineExecutor(context, tensors).worker
    shown = features.choose_images(opened, 60)["plain"][1]

    def look(client, sent):
        client.model.eval()
        x, y = client.data.batch("train", torch.from_numpy(np.searchsorted(first.train, shown)))
        return client.update(params={}, extra={"x": client.model.features(x).detach(), "y": y})

    first = opened.setup.partition.clients[0]
    answer, _ = worker.call(Call(first.id, look, "look", opened.state.broadcast()), {})
    mine = [row for row in rows if row["domain"] == "plain"]
    with exact_numbers():
        call = Call(first.id, look, "look", opened.state.broadcast())
        exact, _ = Exact(context, tensors).worker.call(call, {})
    found = torch.tensor([row["features"] for row in mine])
    equally_near([answer.extra["x"]], [found], [exact.extra["x"]])
    assert [row["label"] for row in mine] == answer.extra["y"].tolist()


def test_features_by_class(run, tmp_path):
    """Up to six test images of each of the ten classes, none of the held-out domain."""
    before = (run / "features.parquet").read_bytes()
    assert feature_map.main([str(run), "--images", "60", "--by", "class"]) == 0
    rows = pq.read_table(run / "features.parquet").to_pylist()
    (run / "features.parquet").write_bytes(before)
    assert [row["class"] for row in rows] == [str(row["label"]) for row in rows]
    assert {row["domain"] for row in rows} <= {"plain", "inverted", "blended", "fonts"}
    opened = reopen(run)
    tests = opened.setup.partition.domain_tests()
    there = np.bincount(opened.setup.dataset.labels[np.concatenate(list(tests.values()))])
    assert np.bincount([row["label"] for row in rows]).tolist() == np.minimum(there, 6).tolist()
    chosen = features.chosen_by_class(opened, 60)
    assert all(np.isin(own, tests[domain]).all() for domain, (_, own) in chosen.items())


def test_the_share_of_neighbours_of_the_same_class_by_hand():
    """On a line: 0 and 1 are neighbours, 2.5 is nearest to 1, and 10 to 2.5."""
    rows = [{"features": [x], "label": y} for x, y in ((0.0, 0), (1.0, 0), (2.5, 1), (10.0, 1))]
    assert features.same_class_share(rows) == 0.75


def test_proxy_a_distance_tells_apart_what_differs():
    rng = np.random.default_rng(0)
    unseen = np.arange(200) % 2 == 1
    x = rng.normal(size=(200, 4))
    assert features.proxy_a_distance(x, unseen) < 0.4
    assert features.proxy_a_distance(x + 10 * unseen[:, None], unseen) == 2.0


def test_what_cannot_be_looked_at_is_said(run, tmp_path, capsys, small):
    assert landscape.main([str(tmp_path)]) == 2
    assert "holds no run (there is no config.yaml)" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("rounds: 1")
    assert landscape.main([str(tmp_path)]) == 2
    said = "is not the folder of a finished run; no round was finished; run the same command again"
    assert said in capsys.readouterr().err
    (tmp_path / "config.yaml").unlink()
    assert landscape.main([str(run.parent)]) == 2
    assert f"give the folder of a run, such as {run}" in capsys.readouterr().err
    plain = small("rounds=1").path
    assert feature_map.main([str(plain)]) == 2
    error = capsys.readouterr().err
    assert "has seen all domains" in error
    assert "/config.yaml data.held_out=" in error


@pytest.mark.parametrize("letters", [3, 9, 60])
def test_a_partition_of_few_clients_has_room_for_the_names_of_its_classes(letters):
    classes = [f"{i}".rjust(letters, "x") for i in range(10)]
    clients = [f"c{i % 5}" for i in range(50)]
    table = pa.table(
        {
            "label": [i % 10 for i in range(50)],
            "split": ["train"] * 50,
            "client": clients,
            "domain": ["all"] * 50,
            "index": list(range(50)),
        }
    )
    drawing = draw_partition(table, classes, "mails")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawing.figure.canvas.draw()
