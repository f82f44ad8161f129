"""HarmoFL: amplitude normalization of the images of all clients, and local steps with weight perturbation.

Jiang, Wang, Dou, HarmoFL: Harmonizing Local and Global Drifts in Federated Learning on Heterogeneous Medical
Images, AAAI 2022 [jiang2022harmofl], section 3. In the released code the replaced window of the spectrum has
half-width 0, so that only the constant component changes. This is a shift of each channel and needs no
Fourier transform.

Differs from the released code: the amplitude of a client is the mean over all its training images instead of
its first batch (`amplitude=first_batch`), and the server weights clients by their number of examples, in the
mean of the amplitudes (`amplitude_mean=uniform`) and of the models (`server.weighting=uniform`).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms._sharpness import PerturbedLocal
from rayfed import Broadcast, Client, Cohort, Knob, Method, ServerState, Update
from rayfed.objective import CLASSIFICATION, SEGMENTATION
from rayfed.types import NonNegative

AMPLITUDE = "amplitude"


@dataclass(frozen=True)
class Harmonized(PerturbedLocal):
    """Amplitude normalization of inputs in training and testing, and weight perturbation in training.

    Attributes:
        alpha: L2 norm of the weight perturbation.
        amplitude: Images over which a client averages its amplitude: its training split or its first batch.
        amplitude_mean: Weight of a client in the mean of the amplitudes: its number of training examples, or
            the same for all.
    """

    alpha: NonNegative = 0.05
    amplitude: Literal["train_split", "first_batch"] = "train_split"
    amplitude_mean: Literal["data_size", "uniform"] = "data_size"

    tasks: ClassVar[frozenset[str]] = frozenset({CLASSIFICATION, SEGMENTATION})

    @property
    def radius(self) -> float:
        return self.alpha

    def exchange(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Before the first round: share the mean amplitude of all available clients; it stays fixed."""
        if AMPLITUDE in state.shared:
            return state
        task = partial(measure_amplitude, first_batch=self.amplitude == "first_batch")
        answers = cohort.everyone.run(task, state.broadcast(params={}), tag=AMPLITUDE)
        counts = [1 if self.amplitude_mean == "uniform" else answer.num_examples for answer in answers]
        parts = zip(answers, counts, strict=True)
        mean = sum((a.extra[AMPLITUDE] * (count / sum(counts)) for a, count in parts), torch.zeros(3))
        return state.share(**{AMPLITUDE: mean})

    def prepare(self, client: Client, sent: Broadcast) -> None:
        if AMPLITUDE in sent.shared:
            client.transform = partial(shift_channels, amplitude=sent.shared[AMPLITUDE])


def measure_amplitude(client: Client, sent: Broadcast, first_batch: bool) -> Update:
    """Task that returns the amplitude of the constant component, mean over images, for each channel.

    The amplitude is |sum over pixels|, shape (3,).
    """
    total = torch.zeros(3, device=client.device)
    num = 0
    for x, _ in client.batches(shuffle=first_batch):
        total += x.sum(dim=(2, 3)).abs().sum(0)
        num += len(x)
        if first_batch:
            break
    return Update(
        client=client.id, num_examples=client.data.size("train"), extra={AMPLITUDE: total / max(num, 1)}
    )


def shift_channels(x: Tensor, amplitude: Tensor) -> Tensor:
    """Shift each channel of each image so that its constant component has this amplitude and keeps its sign.

    Args:
        x: Images, shape (B, C, H, W).
        amplitude: |sum over pixels| of each channel after the shift, shape (C,).
    """
    mean = x.mean(dim=(2, 3), keepdim=True)
    target = amplitude.view(1, -1, 1, 1) / (x.shape[2] * x.shape[3])
    return x + (torch.where(mean < 0, -target, target) - mean)


METHOD = Method(local=Harmonized, knob=Knob("local.alpha", 0.01, 0.5))
