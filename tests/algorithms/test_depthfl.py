import pytest
import torch
import torch.nn.functional as F

from algorithms.depthfl import MutualDistillation, distillation_loss, exit_loss, ramp
from rayfed import simulate
from rayfed.config.schema import load_config
from rayfed.errors import ConfigError
from rayfed.models.build import build_backbone
from rayfed.models.model_config import ModelConfig
from rayfed.tuning.base import apply_tuning, export
from rayfed.tuning.exits import Exits
from rayfed.types import ServerState
from tests.algorithms.depth import cohort
from tests.conftest import quickly
from tests.vectors import vector

V5 = vector("fedra", "V5")
LABELS = torch.tensor(V5.inputs["labels"])


def exits():
    return [torch.tensor(z, dtype=torch.float64, requires_grad=True) for z in V5.inputs["logits"]]


def test_v5_cross_entropy_and_divergences():
    z = exits()
    V5.matches([F.cross_entropy(o, LABELS).item() for o in z], V5.expected["ce"])
    found = [[distillation_loss(s, t).item() if s is not t else 0 for t in z] for s in z]
    V5.matches(found, V5.expected["divergence"])
    V5.matches(sum(map(sum, found)), V5.expected["sum_kl"])


@pytest.mark.parametrize(("end", "key"), [(500, "w_T0_500"), (300, "w_T0_300")])
def test_v5_ramp(end, key):
    for round, weight in V5.expected[key].items():
        V5.matches(ramp(int(round), end), weight)


def test_v5_loss_and_gradient():
    for round, total in V5.expected["total_T0_500"].items():
        V5.matches(exit_loss(exits(), LABELS, ramp(int(round), 500)), total)
    z = exits()
    loss = exit_loss(z, LABELS, 1.0)
    loss.backward()
    V5.matches(loss, V5.expected["total_w1"])
    V5.matches(z[0].grad, V5.expected["gradient_of_exit_0"])


def test_v5_the_mean_of_the_exits_predicts():
    model = tuned()
    mean = model.predict(exits())
    V5.matches(mean, V5.expected["ensemble_logits"])
    assert mean.argmax(1).tolist() == V5.expected["ensemble_pred"]


def test_one_exit_has_nobody_to_imitate():
    z = exits()[:1]
    V5.matches(exit_loss(z, LABELS, 1.0), V5.expected["ce"][0])


def test_the_fraction_replaces_the_constant():
    context = cohort({"a": 12}, round=3)
    state = ServerState(round=3, params={})
    shared = MutualDistillation(T0_frac=0.5).exchange(state, context).shared["distillation"]
    assert shared == ramp(3, 5.0)
    assert MutualDistillation(T0=500).exchange(state, context).shared["distillation"] == ramp(3, 500)


def tuned(kind="vit_mini", **options):
    model = build_backbone(ModelConfig(name=kind, pretrained=False), 5, 0)
    return apply_tuning(model, Exits(**options), 0)


PLACES = {
    "paper": {
        12: [3, 6, 9, 12],
        10: [3, 6, 9, 10],
        8: [3, 6, 8],
        6: [3, 6],
        4: [3, 4],
        3: [3],
    },
    "authors_code": {12: [4, 7, 10, 12], 10: [4, 7, 10, 10], 8: [4, 7, 8], 6: [4, 6], 4: [4, 4], 3: [3]},
}


@pytest.mark.parametrize("kind", ["vit_mini", "mixer_mini"])
@pytest.mark.parametrize("variant", PLACES)
def test_where_exits_sit(variant, kind):
    model = tuned(kind, variant=variant).eval()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for depth, places in PLACES[variant].items():
        model.active = range(depth)
        with torch.no_grad():
            outputs = model(x)
            names = [n for n in export(model) if n.startswith("exits.") and n.endswith("weight")]
            assert len(outputs) == len(places)
            assert len(names) == len(places) - (variant == "authors_code")
            heads = [model.exits[n.split(".")[1]] for n in names] + [model.head]
            for output, place, head in zip(outputs, places, heads, strict=False):
                model.active = range(place)
                assert torch.equal(output, head(model.features(x)))  # the same operations in the same order
            model.active = range(depth)
            assert torch.equal(model.predict(outputs), torch.stack(outputs).mean(0))


def test_the_last_exit_can_predict_alone():
    model = tuned(predict="last").eval()
    outputs = model(torch.zeros(1, 3, 32, 32))
    assert torch.equal(model.predict(outputs), outputs[-1])


def test_exits_are_averaged_over_their_owners_and_the_head_travels_only_where_it_trains():
    names = export(tuned())
    assert {n for n in names if not n.startswith("blocks.")} == {
        f"exits.{span}.{leaf}" for span in ("0-2", "3-5", "6-8", "9-11") for leaf in ("weight", "bias")
    }
    assert {"head.weight", "exits.3-3.weight", "exits.6-6.bias"} <= export(
        tuned(variant="authors_code")
    ).keys()


def test_any_selection_of_blocks_has_the_exits_of_the_groups_it_reaches():
    model = tuned(variant="paper", every=2)
    model.active = (0, 5)
    assert len(model(torch.zeros(1, 3, 32, 32))) == 2
    assert model.exits.places((0, 5)) == {"0-1": 0, "4-5": 5}


def test_depthfl_needs_exits(tmp_path):
    with pytest.raises(ConfigError, match="depthfl, which needs tuning=exits"):
        simulate(["algorithm=depthfl", "tuning=lora", "cluster=inline", f"output={tmp_path}/r"])
    with pytest.raises(ConfigError, match=r"tuning\.inner"):
        simulate(["algorithm=depthfl", "tuning.inner.rank=0", "cluster=inline", f"output={tmp_path}/r"])


@pytest.mark.parametrize("variant", quickly(["paper", "authors_code"], ["paper"]))
def test_a_run_reports_both_predictions(tmp_path, variant):
    common = ["cluster=inline", "rounds=2", "data.limit=40", "capacity=[12,10,8,6,3]", "evaluation.every=2"]
    common += ["model.pretrained=false", "figures=false", f"tuning.variant={variant}", "tuning.predict=last"]
    result = simulate([*common, "algorithm=depthfl", f"output={tmp_path}/r"])
    assert result.metrics["accuracy_last_exit"] == pytest.approx(result.metrics["accuracy"])
    assert 0 <= result.metrics["accuracy_ensemble"] <= 1


def test_keys_of_the_inner_scheme_may_be_written_without_inner():
    config = load_config(["algorithm=depthfl", "tuning.rank=2", "tuning.every=4"])
    assert (config.tuning["inner"]["rank"], config.tuning["every"]) == (2, 4)
    with pytest.raises(ConfigError, match=r"tuning\.inner\.rnak.*did you mean 'rank'"):
        load_config(["algorithm=depthfl", "tuning.rnak=2"])
