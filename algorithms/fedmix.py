"""FedMix: mixup with averaged images of other clients, in a first-order approximation.

Yoon, Shin, Hwang, Yang, FedMix: Approximation of Mixup under Mean Augmented Federated Learning, ICLR 2021
[yoon2021fedmix], Eq. 6 and Algorithm 2.

Differs from the baseline of the FedGCR authors, which uses the client's own labels in the second term
(`labels=own`) and pairs every image with every averaged image in the third term (`pairing=all`).
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

from rayfed import Broadcast, Client, Cohort, Knob, Local, Method, ServerState, Update
from rayfed.federation.passes import logits
from rayfed.models.lora_layer import twice_differentiable
from rayfed.objective import CLASSIFICATION
from rayfed.seeds import derive
from rayfed.types import Batch, Count, Fraction

IMAGES = "mean_images"
LABELS = "mean_labels"


@dataclass(frozen=True)
class MeanAugmented(Local):
    """Mixup loss, approximated by a Taylor expansion around the client's own images.

    Attributes:
        lam: Share of the averaged image in the mixture; 0 gives FedAvg.
        mash_size: Number of images of one client in an average. A client with fewer images averages all of
            them; a client with one image sends none.
        pool_limit: Largest number of averages, drawn at random, that are sent to each client.
        labels: Labels of the second term: those of the averaged images, or the client's own.
        pairing: Averages in the third term: one per image, or all of the batch for every image.
    """

    lam: Fraction = 0.05
    mash_size: Annotated[int, Ge(2)] = 2
    pool_limit: Count = 512
    labels: Literal["averaged", "own"] = "averaged"
    pairing: Literal["paired", "all"] = "paired"

    tasks: ClassVar[frozenset[str]] = frozenset({CLASSIFICATION})

    @property
    def averages_rows(self) -> bool:
        return not self.lam  # the third term is a sum over the batch

    @property
    def needs_curvature(self) -> bool:
        return bool(self.lam)

    def exchange(self, state: ServerState, cohort: Cohort) -> ServerState:
        """Before the first round: collect averaged images from all available clients and share them."""
        if IMAGES in state.shared or not self.lam:
            return state
        task = partial(mash, size=self.mash_size)
        answers = cohort.everyone.run(task, state.broadcast(params={}), tag="mash")
        images, labels = (torch.cat([answer.extra[key] for answer in answers]) for key in (IMAGES, LABELS))
        rng = torch.Generator().manual_seed(derive(cohort.seed, "fedmix"))
        chosen = torch.randperm(len(images), generator=rng)[: self.pool_limit]
        return state.share(**{IMAGES: images[chosen], LABELS: labels[chosen]})

    def step(self, client: Client, sent: Broadcast, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
        # Without mixup the fused kernels are used, so that results equal FedAvg's.
        with twice_differentiable() if self.lam else nullcontext():
            super().step(client, sent, batch, optimizer)

    def loss(self, client: Client, sent: Broadcast, batch: Batch) -> Tensor:
        pool = sent.shared.get(IMAGES, ())
        if not self.lam or not len(pool):
            return super().loss(client, sent, batch)
        x = batch[0]
        chosen = client.to_device(torch.randint(len(pool), (len(x),), generator=client.rng))
        other = (sent.shared[key][chosen] for key in (IMAGES, LABELS))
        first, second, third = mixed_loss(client.model, batch, (*other,), self.lam, self.labels, self.pairing)
        return first + second + third


def mixed_loss(
    model: torch.nn.Module,
    batch: Batch,
    other: Sequence[Tensor],
    lam: float,
    labels: str = "averaged",
    pairing: str = "paired",
) -> tuple[Tensor, Tensor, Tensor]:
    """The three terms of the loss; FedMix, Eq. 6.

    Args:
        model: Maps inputs to logits, or to a list of them.
        batch: The client's inputs, shape (B, ...), and labels, shape (B,).
        other: Averaged inputs, shape (B, ...), and their soft labels, shape (B, C).
        lam: Share of the averaged input.
        labels: Labels of the second term, `averaged` or `own`.
        pairing: `paired`: image i with average i, summed over the batch, because the gradient of the mean
            loss contains the factor 1 / B already; `all`: mean over all pairs.
    """
    x, y = batch
    x_mean, y_mean = other
    own = ((1 - lam) * x).detach().requires_grad_()
    out = logits(model(own))
    first = (1 - lam) * F.cross_entropy(out, y)
    second = lam * F.cross_entropy(out, y_mean if labels == "averaged" else y)
    (slope,) = torch.autograd.grad(first, own, create_graph=True)
    slope = slope.flatten(1)
    x_mean = x_mean.flatten(1)
    third = lam * ((slope * x_mean).sum() if pairing == "paired" else (slope @ x_mean.T).mean())
    return first, second, third


def mash(client: Client, sent: Broadcast, size: int) -> Update:
    """Task that returns means of `size` random training images and of their one-hot labels.

    Each image is in one mean; images left over are not used. A mean has at least two images.
    """
    num = client.data.size("train")
    classes = client.model.num_classes
    groups = [
        g for g in torch.randperm(num, generator=client.rng).split(size) if len(g) == min(size, num) > 1
    ]
    images = []
    labels = []
    for rows in groups:
        x, y = client.data.batch("train", rows)
        images.append(x.mean(0))
        labels.append(F.one_hot(y, classes).float().mean(0))
    pixels = (3, client.model.size, client.model.size)
    extra = {
        IMAGES: torch.stack(images) if images else torch.empty(0, *pixels),
        LABELS: torch.stack(labels) if labels else torch.empty(0, classes),
    }
    return Update(client=client.id, num_examples=num, extra=extra)


METHOD = Method(local=MeanAugmented, knob=Knob("local.lam", 0.01, 0.3))
