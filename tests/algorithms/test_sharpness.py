"""FedSAM, HarmoFL and FedMix against FedGCR's specification (V9, V10), numerical derivatives, and FedAvg."""

from types import SimpleNamespace

import pytest
import torch

from algorithms._sharpness import perturb
from algorithms.fedmix import IMAGES, LABELS, MeanAugmented, mixed_loss
from algorithms.harmofl import Harmonized, measure_amplitude, shift_channels
from rayfed.types import ServerState, Update
from tests.conftest import quickly
from tests.rounding import near
from tests.vectors import vector

V9 = vector("fedgcr", "V9")
V10 = vector("fedgcr", "V10")


def test_v9_shift():
    x = torch.tensor([V9.inputs["image"]], dtype=torch.float64)
    V9.matches(x.sum((2, 3)).abs()[0], V9.expected["dc"])
    V9.matches(x.mean((2, 3))[0], V9.expected["means_before"])
    out = shift_channels(x, torch.tensor(V9.inputs["running_dc"]))[0]
    V9.matches(out.mean((1, 2)), V9.expected["means"])
    V9.matches(out[0, 0], V9.expected["row_0_0"])
    V9.matches(out[1, 0], V9.expected["row_1_0"])


def test_the_shift_is_what_the_fourier_transform_does():
    x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    amplitude = torch.tensor([3.0, 1.0, 2.0])
    spectrum = torch.fft.fft2(x)
    size = spectrum.abs()
    size[:, :, 0, 0] = amplitude
    back = torch.fft.ifft2(torch.polar(size, spectrum.angle())).real
    # Six butterflies there and six back, four operations around them; the spectrum is divided by 64 again.
    near(shift_channels(x, amplitude), back, 2 * 6 + 4, float(x.abs().max()))


def test_v9_climb():
    w = torch.nn.Parameter(torch.tensor(V9.inputs["weights"]).double())
    w.grad = torch.tensor(V9.inputs["gradient"]).double()
    [(_, before)] = perturb([w, torch.nn.Parameter(torch.zeros(1))], V9.inputs["rho"])
    V9.matches(w, V9.expected["perturbed"])
    V9.matches(before, V9.inputs["weights"])
    w.grad = torch.zeros_like(w)
    perturb([w], V9.inputs["rho"])
    V9.matches(w, V9.expected["perturbed"])


def numbers(name):
    return torch.tensor(V10.inputs[name], dtype=torch.float64)


W = numbers("weights")
BATCH = numbers("x"), torch.tensor(V10.inputs["y"])
OTHER = numbers("x_mean"), numbers("y_mean")
LAM = V10.inputs["lam"]


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())

    def forward(self, x):
        return x @ self.w.T


def test_v10_terms():
    terms = torch.stack(mixed_loss(Linear(), BATCH, OTHER, LAM))
    V10.matches(terms, [V10.expected[name] for name in ("first", "second", "third")])
    V10.matches(terms.sum(), V10.expected["total"])
    terms = torch.stack(mixed_loss(Linear(), BATCH, OTHER, LAM, "own", "all"))
    V10.matches(terms, [V10.expected[name] for name in ("first", "second_authors", "third_authors")])
    V10.matches(terms.sum(), V10.expected["total_authors"])


@pytest.mark.parametrize(
    ("options", "total"),
    [({}, "total"), ({"labels": "own", "pairing": "all"}, "total_authors")],
)
def test_v10_the_loss_of_a_batch_is_the_sum_of_the_terms(monkeypatch, options, total):
    """With image i of the batch paired with average i of the pool."""
    monkeypatch.setattr(torch, "randint", lambda high, size, generator: torch.arange(size[0]))
    client = SimpleNamespace(model=Linear(), rng=None, to_device=lambda value: value)
    sent = SimpleNamespace(shared=dict(zip((IMAGES, LABELS), OTHER, strict=True)))
    V10.matches(MeanAugmented(lam=LAM, **options).loss(client, sent, BATCH), V10.expected[total])


def test_fedmix_shares_the_means_of_all_clients():
    """Of three means, drawn without repetition, each with its labels; no more than the limit."""
    answers = [
        Update(client=cid, extra={IMAGES: torch.tensor(images), LABELS: torch.tensor(images) / 10})
        for cid, images in (("a", [[1.0]]), ("b", [[2.0], [3.0]]))
    ]
    everyone = SimpleNamespace(run=lambda *given, **more: answers)
    context = SimpleNamespace(everyone=everyone, seed=0)
    for limit, count in ((512, 3), (2, 2)):
        shared = MeanAugmented(pool_limit=limit).exchange(ServerState(round=0, params={}), context).shared
        drawn = shared[IMAGES][:, 0].tolist()
        assert len(drawn) == len(set(drawn) & {1.0, 2.0, 3.0}) == count
        assert torch.equal(shared[LABELS], shared[IMAGES] / 10)


def test_v10_parts_of_the_terms():
    """The first two terms are these cross entropies of the shrunken images, the third uses this gradient."""
    x = ((1 - LAM) * BATCH[0]).requires_grad_()
    logits = Linear()(x)
    each = torch.nn.functional.cross_entropy(logits, BATCH[1], reduction="none")
    V10.matches(each, V10.expected["cross_entropy"])
    V10.matches((1 - LAM) * each.mean(), V10.expected["first"])
    soft = -(logits.log_softmax(1) * OTHER[1]).sum(1)
    V10.matches(soft, V10.expected["cross_entropy_mean_labels"])
    V10.matches(LAM * soft.mean(), V10.expected["second"])
    [gradient] = torch.autograd.grad((1 - LAM) * each.mean(), x)
    V10.matches(gradient, V10.expected["gradient"])
    V10.matches(LAM * (gradient * OTHER[0]).sum(), V10.expected["third"])


def test_v10_second_derivative():
    model = Linear()
    sum(mixed_loss(model, BATCH, OTHER, LAM)).backward()
    eps = 1e-6
    for i, j in ((0, 0), (1, 1), (2, 0)):
        values = []
        for sign in (1, -1):
            shifted = Linear()
            with torch.no_grad():
                shifted.w[i, j] += sign * eps
            values.append(sum(mixed_loss(shifted, BATCH, OTHER, LAM)).item())
        # Differences of losses of at most 4, each with thirty roundings; eps squared is far below those.
        near(model.w.grad[i, j], (values[0] - values[1]) / (2 * eps), 30, 4 / (2 * eps), torch.float64)


@pytest.mark.parametrize("tuning", quickly(["visual_prompt", "lora"], ["lora"]))
def test_fedsam_and_fedmix_reduce_to_fedavg(short, tuning):
    plain = short("fedavg", f"tuning={tuning}")
    assert short("fedsam", f"tuning={tuning}", "local.rho=0").sha256 == plain.sha256
    assert short("fedmix", f"tuning={tuning}", "local.lam=0").sha256 == plain.sha256
    assert short("fedsam", f"tuning={tuning}").sha256 != plain.sha256


@pytest.mark.slow
@pytest.mark.steady
@pytest.mark.parametrize("tuning", ["visual_prompt", "gc_prompt"])
def test_fedmix_runs_with_attention(short, tuning):
    mixed = short("fedmix", f"tuning={tuning}")
    assert mixed.sha256 != short("fedmix", f"tuning={tuning}", "local.lam=0").sha256
    assert all(torch.isfinite(value).all() for value in mixed.params.values())


@pytest.mark.slow
@pytest.mark.steady
def test_fedmix_with_single_images(short):
    tiny = ("data.partition.scheme=imbalanced", "data.partition.factor=10", "data.limit=300")
    short("fedmix", *tiny, "local.mash_size=1000", "local.pool_limit=3", "rounds=1")
    short("fedmix", *tiny, "local.labels=own", "local.pairing=all", "rounds=1")


@pytest.mark.parametrize(("first_batch", "expected"), [(True, [1.0, 4.0, 8.0]), (False, [2.0, 5.0, 7.0])])
def test_the_amplitude_of_a_client_by_hand(first_batch, expected):
    """Sums over the four pixels of a channel, without sign: 1, 4 and 8; in the second batch 3, 6 and 6."""
    batches = [
        torch.tensor(sums).reshape(1, 3, 1, 1).expand(1, 3, 2, 2) / 4
        for sums in ([1.0, -4.0, 8.0], [-3.0, 6.0, 6.0])
    ]
    client = SimpleNamespace(
        id="a",
        device="cpu",
        data=SimpleNamespace(size=lambda split: 2),
        batches=lambda shuffle: iter([(x, None) for x in batches]),
    )
    assert measure_amplitude(client, None, first_batch).extra["amplitude"].tolist() == expected


@pytest.mark.parametrize(("kind", "expected"), [("data_size", [2.5, 2.0, 4.5]), ("uniform", [2.0, 2.0, 4.0])])
def test_the_mean_of_the_amplitudes_by_hand(kind, expected):
    answers = [
        Update(client=cid, num_examples=n, extra={"amplitude": torch.tensor(amplitude)})
        for cid, n, amplitude in (("a", 1, [1.0, 2.0, 3.0]), ("b", 3, [3.0, 2.0, 5.0]))
    ]
    everyone = SimpleNamespace(run=lambda *given, **more: answers)
    state = ServerState(round=0, params={})
    shared = Harmonized(amplitude_mean=kind).exchange(state, SimpleNamespace(everyone=everyone)).shared
    assert shared["amplitude"].tolist() == expected


@pytest.mark.slow
@pytest.mark.steady
def test_harmofl_shares_one_amplitude_and_tests_with_it(short):
    import pyarrow.parquet as pq

    result = short("harmofl")
    rows = pq.read_table(result.path / "transfers.parquet").to_pylist()
    once = [row for row in rows if row["exchange"] == "amplitude"]
    assert {(row["round"], row["up"]) for row in once} == {(1, 12)}
    assert len(once) == 5
    sam = short("fedsam", "local.rho=0.05")
    assert result.history.loss.tolist() != sam.history.loss.tolist()
    first, every = (
        short("harmofl", f"local.amplitude={kind}", "train.batch_size=8")
        for kind in ("first_batch", "train_split")
    )
    assert first.sha256 != every.sha256
