"""FedSAM, HarmoFL and FedMix against FedGCR's specification (V9, V10), numerical derivatives, and FedAvg."""

import numpy as np
import pytest
import torch

from algorithms._sharpness import perturb
from algorithms.fedmix import mixed_loss
from algorithms.harmofl import shift_channels

IMAGE = [
    [[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8], [0.9, 1.0, 0.0, 0.1], [0.2, 0.3, 0.4, 0.5]],
    [[-0.5, -0.1, -0.2, 0.1], [-0.3, 0.0, 0.2, -0.4], [-0.6, -0.2, 0.3, -0.1], [0.0, -0.2, -0.1, 0.1]],
]


def near(value, expected, tol=1e-6):
    np.testing.assert_allclose(np.asarray(value.detach(), dtype=float), expected, atol=tol, rtol=0)


def test_v9_shift():
    x = torch.tensor([IMAGE], dtype=torch.float64)
    near(x.sum((2, 3)).abs()[0], [7, 2])
    out = shift_channels(x, torch.tensor([8.0, 4.0]))[0]
    near(out.mean((1, 2)), [0.5, -0.25])
    near(out[0, 0], [0.1625, 0.2625, 0.3625, 0.4625])
    near(out[1, 0], [-0.625, -0.225, -0.325, -0.025])


def test_the_shift_is_what_the_fourier_transform_does():
    x, amplitude = (
        torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.tensor([3.0, 1.0, 2.0]),
    )
    spectrum = torch.fft.fft2(x)
    size = spectrum.abs()
    size[:, :, 0, 0] = amplitude
    back = torch.fft.ifft2(torch.polar(size, spectrum.angle())).real
    near(shift_channels(x, amplitude), back, 1e-5)


def test_v9_climb():
    w = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    w.grad = torch.tensor([3.0, 4.0])
    [(_, before)] = perturb([w, torch.nn.Parameter(torch.zeros(1))], 0.05)
    near(w, [1.03, -1.96])
    near(before, [1, -2])
    w.grad = torch.zeros(2)
    perturb([w], 0.05)
    near(w, [1.03, -1.96])


W = torch.tensor([[0.2, -0.1], [0.0, 0.3], [-0.4, 0.1]], dtype=torch.float64)
BATCH = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64), torch.tensor([0, 2])
OTHER = (
    torch.tensor([[0.3, 0.4], [0.6, -0.2]], dtype=torch.float64),
    torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]], dtype=torch.float64),
)


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(W.clone())

    def forward(self, x):
        return x @ self.w.T


def test_v10_terms():
    first, second, third = mixed_loss(Linear(), BATCH, OTHER, 0.05)
    near(torch.stack((first, second, third)), [0.996431, 0.047100, 0.004354])
    near(first + second + third, 1.047885)
    first, second, third = mixed_loss(Linear(), BATCH, OTHER, 0.05, "own", "all")
    near(torch.stack((second, third)), [0.052444, 0.000487])
    near(first + second + third, 1.049362)


def test_v10_second_derivative():
    model = Linear()
    sum(mixed_loss(model, BATCH, OTHER, 0.05)).backward()
    eps = 1e-6
    for i, j in ((0, 0), (1, 1), (2, 0)):
        values = []
        for sign in (1, -1):
            shifted = Linear()
            with torch.no_grad():
                shifted.w[i, j] += sign * eps
            values.append(sum(mixed_loss(shifted, BATCH, OTHER, 0.05)).item())
        assert model.w.grad[i, j].item() == pytest.approx((values[0] - values[1]) / (2 * eps), abs=1e-7)


@pytest.mark.parametrize("tuning", ["visual_prompt", "lora"])
def test_fedsam_and_fedmix_reduce_to_fedavg(short, tuning):
    plain = short("fedavg", f"tuning={tuning}")
    assert short("fedsam", f"tuning={tuning}", "local.rho=0").sha256 == plain.sha256
    assert short("fedmix", f"tuning={tuning}", "local.lam=0").sha256 == plain.sha256
    assert short("fedsam", f"tuning={tuning}").sha256 != plain.sha256


@pytest.mark.parametrize("tuning", ["visual_prompt", "gc_prompt"])
def test_fedmix_runs_with_attention(short, tuning):
    mixed = short("fedmix", f"tuning={tuning}")
    assert mixed.sha256 != short("fedmix", f"tuning={tuning}", "local.lam=0").sha256
    assert all(torch.isfinite(value).all() for value in mixed.params.values())


def test_fedmix_with_single_images(short):
    tiny = ("data.partition.scheme=imbalanced", "data.partition.factor=10", "data.limit=300")
    short("fedmix", *tiny, "local.mash_size=1000", "local.pool_limit=3", "rounds=1")
    short("fedmix", *tiny, "local.labels=own", "local.pairing=all", "rounds=1")


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
