"""FedMix: local mixup with averaged images of other clients, to first order.

Yoon, Shin, Hwang, Yang, FedMix: Approximation of Mixup under Mean Augmented Federated Learning, ICLR 2021,
Eq. 6 and Algorithm 2.

Differs from the FedGCR authors' baseline, which uses the client's own labels in the second term
(`labels=own`) and pairs every image with every averaged one in the third (`pairing=all`).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rayfed.federation.client import Client
from rayfed.federation.cohort import Cohort
from rayfed.federation.local import Local, logits
from rayfed.federation.method import Method
from rayfed.objective import CLASSIFICATION
from rayfed.seeds import derive
from rayfed.types import Batch, Broadcast, Count, Fraction, ServerState, Update

IMAGES, LABELS = "mean_images", "mean_labels"


@dataclass(frozen=True)
class MeanAugmented(Local):
    """Loss on mixed images, approximated around the client's own.

    Attributes:
        lam: Share of the other image; 0 is FedAvg.
        mash_size: Images in an average, of one client. A smaller client averages all it has, one with a
            single image gives nothing.
        pool_limit: At most so many averages, drawn at random, travel to the clients.
        labels: Labels of the second term.
        pairing: Which averages the third term looks at: one per image, or all of a batch with all images.
    """

    lam: Fraction = 0.05
    mash_size: Annotated[int, Ge(2)] = 2
    pool_limit: Count = 512
    labels: Literal["averaged", "own"] = "averaged"
    pairing: Literal["paired", "all"] = "paired"

    tasks: ClassVar[frozenset[str]] = frozenset({CLASSIFICATION})

    def exchange(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Once, before the first round: collect averages from everybody."""
        if IMAGES in state.shared or not self.lam:
            return state
        task = partial(mash, size=self.mash_size)
        answers = cohort.everyone.run(task, state.broadcast(params={}), tag="mash")
        images, labels = (torch.cat([answer.extra[key] for answer in answers]) for key in (IMAGES, LABELS))
        rng = torch.Generator().manual_seed(derive(cohort.seed, "fedmix"))
        chosen = torch.randperm(len(images), generator=rng)[: self.pool_limit]
        return state.share(**{IMAGES: images[chosen], LABELS: labels[chosen]})

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        # The fused kernels have no second derivative; where none is needed, they must not change.
        with sdpa_kernel(SDPBackend.MATH) if self.lam else nullcontext():
            super().step(client, sent, batch, optimizer)

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        pool = sent.shared.get(IMAGES, ())
        if not self.lam or not len(pool):
            return super().loss(client, sent, batch)
        x = batch[0]
        chosen = torch.randint(len(pool), (len(x),), generator=client.rng)
        other = (sent.shared[key][chosen].to(x.device) for key in (IMAGES, LABELS))
        return sum_of(mixed_loss(client.model, batch, (*other,), self.lam, self.labels, self.pairing))


def mixed_loss(
    model: torch.nn.Module,
    batch: Batch,
    other: Sequence[Tensor],
    lam: float,
    labels: str = "averaged",
    pairing: str = "paired",
) -> tuple[Tensor, Tensor, Tensor]:
    """The three terms of the loss.

    Args:
        model: From inputs to logits, or a list of them.
        batch: Own inputs (B, ...) and labels (B,).
        other: Averaged inputs (B, ...) and their soft labels (B, C).
        lam: Share of the other input.
        labels: `averaged` or `own`, in the second term.
        pairing: `paired`: image i with average i, summed over the batch, because the gradient of a mean
            carries 1 / B already; `all`: the mean over all pairs.
    """
    (x, y), (x_mean, y_mean) = batch, other
    own = ((1 - lam) * x).detach().requires_grad_()
    out = logits(model(own))
    first = (1 - lam) * F.cross_entropy(out, y)
    second = lam * F.cross_entropy(out, y_mean if labels == "averaged" else y)
    (slope,) = torch.autograd.grad(first, own, create_graph=True)
    slope, x_mean = slope.flatten(1), x_mean.flatten(1)
    third = lam * ((slope * x_mean).sum() if pairing == "paired" else (slope @ x_mean.T).mean())
    return first, second, third


def sum_of(terms: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return terms[0] + terms[1] + terms[2]


def mash(client: Client, sent: Broadcast, size: int) -> Update:
    """Means of `size` random images and of their labels, each image used once; never of a single image."""
    num, classes = client.data.size("train"), client.model.num_classes
    groups = [
        g for g in torch.randperm(num, generator=client.rng).split(size) if len(g) == min(size, num) > 1
    ]
    images, labels = [], []
    for rows in groups:
        x, y = client.data.batch("train", rows)
        images.append(x.mean(0).cpu())
        labels.append(F.one_hot(y, classes).float().mean(0).cpu())
    pixels = (3, client.model.size, client.model.size)
    extra = {
        IMAGES: torch.stack(images) if images else torch.empty(0, *pixels),
        LABELS: torch.stack(labels) if labels else torch.empty(0, classes),
    }
    return Update(client=client.id, num_examples=num, extra=extra)


METHOD = Method(local=MeanAugmented)
