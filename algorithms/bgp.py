"""BGP: two steps on two batches, the second one pulling features towards the global model's.

Du et al., FFT-GP (federated fine-tuning: generalise and personalise), Algorithm 2. The alignment is CORAL in
the form of DomainBed: means and covariances. It compares image features, or, where prompts train and the
image side does not, the features of the class prompts. Where a model segments, pixels are the samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from algorithms._meta import InnerOptimizer, meta_step
from rayfed.federation.client import Client
from rayfed.federation.local import Local, logits
from rayfed.federation.method import Method
from rayfed.models.backbone import samples_of
from rayfed.tuning.base import train_mode
from rayfed.types import Batch, Broadcast, NonNegative, Positive, Update

CoralForm: TypeAlias = Literal["domainbed", "deep"]


@dataclass(frozen=True)
class MetaLocal(Local):
    """Meta-training and meta-update.

    Attributes:
        align_weight: Factor on the alignment; 0: none.
        meta_update: Where the second step starts: `sequential`: where the first one ended (the paper);
            `fo_restore`: where the first one started, with the gradient found after it (first-order MAML);
            `second_order`: the same with the derivative through the first step; `none`: no first step, one
            ordinary step per batch ("only DA").
        meta_batch: `fresh`: the second step has a batch of its own; `half`: both share one.
        inner_lr: Learning rate of the first step; none: train.lr.
        inner_optimizer: What takes the first step: the client's optimizer, whose state both steps share, or
            plain SGD (always with second_order).
        coral: Form of the alignment: DomainBed's, or Deep CORAL's (covariances only).
    """

    align_weight: NonNegative = 1.0
    meta_update: Literal["sequential", "fo_restore", "second_order", "none"] = "sequential"
    meta_batch: Literal["fresh", "half"] = "fresh"
    inner_lr: Positive | None = None
    inner_optimizer: InnerOptimizer = "client"
    coral: CoralForm = "domainbed"

    def train(self, client: Client, sent: Broadcast) -> Update:
        optimizer = client.optimizer()
        texts = global_texts(client)
        pulls: list[Tensor] = []
        for first, second in self._pairs(client):
            task = partial(self.loss, client, sent)
            aligned = partial(self.aligned_loss, client, sent, second, texts, pulls)
            if first is None or self.meta_update == "none":
                optimizer.zero_grad()
                aligned().backward()
                client.clip_gradients()
                optimizer.step()
            else:
                meta_step(
                    optimizer,
                    partial(task, first),
                    aligned,
                    self.meta_update,
                    self.inner_lr,
                    client.clip_gradients,
                    self.inner_optimizer,
                )
        size = {"train/alignment": float(torch.stack(pulls).mean())} if pulls else {}
        return client.update(metrics=size)

    def _pairs(self, client: Client) -> Iterator[tuple[Batch | None, Batch]]:
        """Batches of the two steps; no first one where there is no meta split, or nothing to split."""
        if self.meta_update == "none":
            yield from ((None, batch) for batch in client.batches())
        elif self.meta_batch == "fresh":
            yield from zip(client.batches(), client.batches(), strict=True)
        else:
            for x, y in client.batches():
                middle = len(y) // 2
                yield ((x[:middle], y[:middle]), (x[middle:], y[middle:])) if middle else (None, (x, y))

    def aligned_loss(
        self,
        client: Client,
        sent: Broadcast,
        batch: Batch,
        texts: Tensor | None,
        pulls: list[Tensor],
    ) -> Tensor:
        """Task loss of a batch plus the alignment of its features.

        Args:
            client: Whose model it is.
            sent: Holds the global model.
            batch: Images and labels.
            texts: Features of the class prompts under the global model, where these are aligned.
            pulls: The size of the alignment is added here, for the report.
        """
        x, y = batch
        model = client.model
        if not self.align_weight:
            return self.loss(client, sent, batch)
        if texts is not None:
            ours, theirs = model.class_features(), texts
            task = client.objective.loss(model.head(model(x, headless=True), ours), y)
        elif model.exits is not None:  # features that end at several depths are not aligned
            return client.objective.loss(logits(model(x)), y)
        else:
            features = model(x, headless=True)
            ours, task = samples_of(features), client.objective.loss(model.classify(features), y)
            theirs = samples_of(global_features(client, sent, x)) if len(ours) > 1 else ours
        if len(ours) < 2:
            return task
        pull: Tensor = coral(theirs, ours, self.coral)
        pulls.append(pull.detach())
        return task + self.align_weight * pull


def global_texts(client: Client) -> Tensor | None:
    """Features of the class prompts under the model just received, where only these train."""
    model = client.model
    if not (model.text_is_live and model.net_is_frozen and model.adapter is None):
        return None
    return model.class_features().detach().clone()


def global_features(client: Client, sent: Broadcast, x: Tensor) -> Tensor:
    """Features of images under the model just received, in evaluation mode."""
    client.model.eval()  # in train mode BatchNorm would write into the message
    try:
        found: Tensor = client.reference(sent.params, x, headless=True)
    finally:
        train_mode(client.model)
    return found


def coral(source: Array, target: Array, form: CoralForm = "domainbed") -> Array:
    """Distance between the first two moments of two sets of features.

    DomainBed: mean over dimensions of the squared difference of means, plus mean over entries of that of
    covariances (over n - 1). Sun and Saenko, Deep CORAL, 2016, Eq. 1: covariances only, over 4 D^2.

    Args:
        source: Shape (n, D), n >= 2.
        target: Shape (m, D), m >= 2.
        form: Which of the two.

    Raises:
        ValueError: A set has fewer than two rows, so it has no covariance.
    """
    (a, b), back = to_tensors(source, target)
    if min(len(a), len(b)) < 2:
        raise ValueError(f"CORAL needs at least two rows in each set, got {len(a)} and {len(b)}")
    between = (_covariance(a) - _covariance(b)).square()
    if form == "deep":
        return back(between.sum() / (4 * a.shape[1] ** 2))
    return back((a.mean(0) - b.mean(0)).square().mean() + between.mean())


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(0, keepdim=True)
    return centred.T @ centred / (len(x) - 1)


METHOD = Method(local=MetaLocal)
