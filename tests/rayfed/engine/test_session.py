"""Actors of a session start next to each other and end with it; on GPUs a run says what would be faster."""

import pytest

from rayfed.config.schema import load_config
from rayfed.engine.session import Session, cheaper_products, launch
from rayfed.experiment.experiment import simulate
from rayfed.experiment.plan import prepared
from rayfed.experiment.single_run import begin
from rayfed.federation.train_config import TrainConfig
from rayfed.record import claim as folders
from tests.conftest import SMALL


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_nothing_is_said_where_tensor_cores_are_used(precision):
    assert cheaper_products(TrainConfig(precision=precision)) == ""


def test_the_default_names_what_is_faster():
    assert "up to 7 times as fast with train.precision=tf32, and 15 times with bf16" in cheaper_products(
        TrainConfig()
    )


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.ray
def test_client_actors_start_beside_the_driver_are_replaced_and_end_with_the_session(
    ray_cluster, cache, tmp_path
):
    import ray
    from ray.util import list_named_actors

    def ours():
        return {found["name"]: found["namespace"] for found in list_named_actors(all_namespaces=True)}

    path = tmp_path / "run"
    own = [*SMALL, f"data.cache={cache}"]
    there = ["cluster=local", "cluster.actors=2", "cluster.cpus_per_actor=0.1", f"output={path}"]
    config = load_config([*own, *there])
    setup = prepared(config)
    before = ours()
    with Session() as session, folders.claim(path, "") as claim:
        begin(config, setup, claim, lambda _: None, resume=False)
        with launch(setup, path, claim=claim.token, session=session) as rows:
            next(rows)
            found = {name: space for name, space in ours().items() if name not in before}
            first = min(name for name in found if name.startswith("rayfed:clients:"))
            ray.kill(ray.get_actor(first, namespace=found[first]))
            [digest] = [row["sha256"] for row in rows if "sha256" in row]
    assert found.keys() == {"rayfed:driver:run", "rayfed:clients:run:00", "rayfed:clients:run:01"}
    alone = simulate([*own, "cluster=inline", f"output={tmp_path / 'alone'}"])
    assert digest == alone.sha256
    assert ours() == before
