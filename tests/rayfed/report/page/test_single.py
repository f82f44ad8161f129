"""The page about one run shows the numbers of its folder."""

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayfed.record.recorded_run import RecordedRun
from rayfed.report.page import single
from rayfed.report.page.parts import Figure, Tiles
from rayfed.report.page.single import sections, single_page
from rayfed.terminal.table_formats import Table
from tests.rayfed.report.page import folders
from tests.rayfed.report.page.conftest import part_of, table_of


def scored(path, exchange, metric="accuracy", number=4):
    rows = pq.read_table(path / "clients.parquet").to_pylist()
    return {
        r["client"]: r["value"]
        for r in rows
        if (r["round"], r["exchange"], r["metric"]) == (number, exchange, metric)
    }


def test_it_has_all_sections(run_page):
    names = [section.name for section in run_page.sections]
    assert names == [
        *("Summary", "Curves", "Domains and clients", "Fairness", "Who has what", "Method", "Transfers"),
        *("Time", "Failures", "Config", "Repeat it", "Words"),
    ]


def test_the_summary_is_the_last_round(run_page, run_folder):
    tiles = next(p for p in run_page.sections[0].parts if isinstance(p, Tiles))
    row = json.loads((run_folder / "rounds.jsonl").read_text().splitlines()[-1])
    found = dict(tiles.pairs)
    assert found["mean over domains, %"] == f"{100 * row['accuracy_domain']:.1f}"
    assert found[f"worst domain: {row['worst_domain']}, %"] == f"{100 * row['worst_domain_accuracy']:.1f}"
    assert found["held-out domain: fonts, %"] == "44.0"
    assert found["sigma_type, deviation over domains, points"] == f"{100 * row['sigma_type']:.1f}"
    assert (found["rounds"], found["clients"], found["time"]) == ("4 of 4", "12", "8 s")
    assert found["local steps of all clients"] == "120, on 1,600 examples"
    assert found["training of all clients, GFLOP"] == "10"  # 1 + 2 + 3 + 4
    assert found["parameters that a client trains"] == "650"
    assert found["sent by clients"] == "48.0 kB"  # 4 rounds x 2 exchanges x 12 clients x 500 bytes


def test_curves_have_the_scores_of_domains_with_the_range_of_their_clients(run_page, run_folder):
    rows = table_of(run_page, "Test accuracy by domain")
    domains, clients = (scored(run_folder, f"report_{kind}") for kind in ("domains", "clients"))
    street = [value for cid, value in clients.items() if int(cid[1:]) % 2 == 0]
    last = rows[-1]
    assert (last["round"], last["street"]) == (4, pytest.approx(domains["street"]))
    assert last["street, lowest"] == pytest.approx(min(street))
    assert last["street, highest"] == pytest.approx(max(street))
    assert last["fonts (held out)"] == pytest.approx(0.44)
    figure = part_of(run_page, "Test accuracy by domain")
    assert [entry.label for entry in figure.legend] == ["street", "plain", "fonts (held out)"]
    assert figure.legend[2].dash
    assert figure.svg.count("<g data-series") == 3


def test_tables_of_domains_and_clients(run_page, run_folder):
    clients = scored(run_folder, "report_clients")
    loss = scored(run_folder, "report_clients", "loss")
    for row in table_of(run_page, "Clients"):
        assert row["accuracy"] == pytest.approx(clients[row["client"]])
        assert row["loss"] == pytest.approx(loss[row["client"]])
    domains = {row["domain"]: row for row in table_of(run_page, "Domains")}
    assert list(domains) == ["street", "plain", "fonts (held out)"]
    assert (domains["street"]["clients"], domains["fonts (held out)"]["clients"]) == (6, 0)
    assert domains["street"]["train images"] == sum(8 + i % 3 for i in range(0, 12, 2))
    assert domains["fonts (held out)"]["test images"] == 5


def test_the_cumulative_curve_and_the_spread(run_page, run_folder):
    clients = np.sort(list(scored(run_folder, "report_clients").values()))
    curve = table_of(run_page, "Share of the clients with at most this score")
    assert [row["accuracy"] for row in curve] == pytest.approx(np.unique(clients))
    assert curve[-1]["global model"] == 1
    assert curve[0]["global model"] == pytest.approx((clients == clients[0]).mean())
    svg = part_of(run_page, "Share of the clients with at most this score").svg
    ticks = re.findall(r">([\d.]+)</text>", svg)
    assert [ticks.count(each) for each in ("0", "20", "40", "60", "80", "100")] == [2] * 6  # on both axes
    (spread,) = table_of(run_page, "Distribution of the clients' accuracy")
    assert spread["worst tenth"] == pytest.approx(clients[0])
    assert spread["deviation"] == pytest.approx(clients.std())
    assert spread["variance, %²"] == pytest.approx(1e4 * clients.var())


def test_heat_maps_of_what_the_method_did(run_page, run_folder):
    held = {row["block"]: row["3"] for row in table_of(run_page, "Clients that hold each block of the model")}
    assert held == {"0": 12, "1": 8, "2": 4}
    share = {row["client"]: row for row in table_of(run_page, "How often each client holds each block")}
    assert [share["c00000"][b] for b in "012"] == [1, 0, 0]
    weights = {
        (r["round"], r["client"]): r["weight"]
        for r in pq.read_table(run_folder / "aggregation.parquet").to_pylist()
    }
    shown = table_of(run_page, "Weight of each client")
    assert all(row["2"] == pytest.approx(weights[2, row["client"]]) for row in shown)
    domain = table_of(run_page, "Weight of each domain")[1]
    street = sum(weight for (number, cid), weight in weights.items() if number == 2 and int(cid[1:]) % 2 == 0)
    assert domain["street"] == pytest.approx(street)
    groups = table_of(run_page, "Group of each client over the rounds")
    first = {row["client"]: row for row in groups}["c00000"]
    assert len({first[number] for number in "1234"}) == 1
    order = [row["client"] for row in groups]
    assert order == sorted(order, key=lambda cid: (int(cid[1:]) % 2, cid))  # domain by domain
    assert table_of(run_page, "beta over the rounds")[-1] == {"round": 4, "beta": pytest.approx(0.4)}


def test_who_has_what(run_page):
    classes = table_of(run_page, "Classes of each client")
    assert set(classes[0]) == {"client", *folders.CLASSES}
    assert sum(classes[0][name] for name in folders.CLASSES) == 10  # 8 training and 2 test images of c00000
    sizes = table_of(run_page, "Training images of each client, the largest first")
    assert [row["training images"] for row in sizes] == [10] * 4 + [9] * 4 + [8] * 4


def test_where_the_bytes_went(run_page):
    exchanges = table_of(run_page, "Where the bytes went, by exchange")
    assert [(r["exchange"], r["to the server"], r["share of all"]) for r in exchanges] == [
        ("fit", 24000, 0.5),
        ("evaluate", 24000, 0.5),
    ]
    domains = table_of(run_page, "Where the bytes went, by domain")
    assert sum(row["to the clients"] for row in domains) == 4 * 2 * 4 * 6000
    computed = table_of(run_page, "Score over the operations of training")
    assert [row["training of all clients, GFLOP"] for row in computed] == [1, 3, 6, 10]
    bought = table_of(run_page, "Score over the bytes sent")
    assert bought[0]["sent in both directions"] == 2 * 12 * 500 + 2 * 24000


def test_times_idle_share_and_failures(run_page):
    times = table_of(run_page, "Time of the rounds")
    assert times[0] == {"round": 1, "clients and server": 1.5, "evaluation of the global model": 0.5}
    assert {row["idle"] for row in table_of(run_page, "Idle share of the actors")} == {0.25}
    kinds = table_of(run_page, "Failures by kind")
    assert {(row["kind"], row["events"]) for row in kinds} == {("error", 1), ("timeout", 1)}
    listed = table_of(run_page, "Failures one by one")
    assert [row["message"] for row in listed] == ["first line", "</script><b>"]


def test_the_command_repeats_the_run(run_page, run_folder):
    texts = {p.title: p for p in run_page.sections[-2].parts}
    assert texts["One command"].code == [f"python -m rayfed.run --config {run_folder}/config.yaml output=NEW"]
    assert texts["Commands with which it was made"].code == ["python -m rayfed.run seed=0"]
    settings = {row["key"]: row["value"] for row in table_of(run_page, "All settings")}
    assert settings["rounds"] == "4"
    assert settings["data.held_out"] == "fonts"


def test_many_clients_have_quantiles_instead_of_rows(run_folder, run_page, monkeypatch):
    for module in (single, single, single, single):
        monkeypatch.setattr(module, "MOST_CLIENTS", 5)
    page = single_page(RecordedRun.opened(run_folder))
    clients = np.array(list(scored(run_folder, "report_clients").values()))
    last = table_of(page, "Score of the clients over the rounds")[-1]
    assert last["median"] == pytest.approx(np.median(clients))
    assert last["90 %"] == pytest.approx(np.quantile(clients, 0.9))
    sizes = table_of(page, "Sizes of the groups")
    assert sizes[0] == {"round": 1, "group 1 by size": 4, "group 2 by size": 4, "group 3 by size": 4}
    assert [row["domain"] for row in table_of(page, "Training images of a client")] == ["street", "plain"]
    assert table_of(page, "Bytes of a client")[0]["to the clients"] == 8000
    shown = [s for s in page.sections if s.name not in ("Config", "Repeat it", "Words")]
    rows = [len(p.rows) for s in shown for p in s.parts if isinstance(p, Figure | Table)]
    assert max(rows) <= 12


def test_a_run_without_tables_of_its_own_is_read_from_its_history(tmp_path):
    folders.write(tmp_path / "run", rounds=3, finish=False)
    page = single_page(RecordedRun.opened(tmp_path / "run"))
    assert table_of(page, "Clients")
    assert table_of(page, "Where the bytes went, by exchange")[0]["to the server"] == 3 * 12 * 500


def test_a_run_before_its_first_round_has_a_page(tmp_path):
    folders.write(tmp_path / "run", rounds=0, finish=False)
    found = sections(RecordedRun.opened(tmp_path / "run"))
    assert {"Summary", "Who has what", "Config"} <= {section.name for section in found}
    assert not [p for s in found if s.name == "Curves" for p in s.parts if isinstance(p, Figure)]
