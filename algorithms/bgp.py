"""BGP: local meta-learning with two steps, the second one with alignment to the global model's features.

Zhang, Fan, Yao, Zhang, Wang, FFT-GP, FITEE 2024 [zhang2024fftgp], section 3.3.2, Algorithm 2. The alignment
loss is CORAL in the form of DomainBed [gulrajani2021domainbed], on means and covariances. It compares image
features; where only text prompts are trained, it compares the features of the class prompts. For
segmentation, each pixel is a sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from algorithms._arrays import Array, to_tensors
from algorithms._meta import InnerOptimizer, meta_step
from rayfed import Broadcast, Client, Knob, Local, Method, Update
from rayfed.federation.passes import logits
from rayfed.models.backbone import Backbone, samples_of
from rayfed.objective import LANGUAGE_MODELING
from rayfed.tuning.base import train_mode
from rayfed.types import Batch, NonNegative, Positive

CoralForm: TypeAlias = Literal["domainbed", "deep"]


@dataclass(frozen=True)
class MetaLocal(Local):
    """Local training with meta-updates of two steps (`algorithms._meta.meta_step`).

    Attributes:
        align_weight: Factor of the alignment loss; 0: no alignment.
        meta_update: Kind of update. `sequential`: the second step starts where the first one ended (the
            paper); `fo_restore`: it starts where the first one started, with the gradient computed after it
            (first-order MAML); `second_order`: the same with the derivative through the first step (MAML);
            `none`: one ordinary step per batch with alignment (the ablation "only DA").
        meta_batch: Data of the second step: `fresh`: its own batch; `half`: the second half of the
            batch, whose first half is used in the first step.
        inner_lr: Learning rate of the first step; none: `train.lr`.
        inner_optimizer: Optimizer of the first step: the client's optimizer, which both steps share, or plain
            SGD. `second_order` always uses plain SGD.
        coral: Form of the alignment loss: DomainBed's, or Deep CORAL's (covariances only).
    """

    align_weight: NonNegative = 1.0
    meta_update: Literal["sequential", "fo_restore", "second_order", "none"] = "sequential"
    meta_batch: Literal["fresh", "half"] = "fresh"
    inner_lr: Positive | None = None
    inner_optimizer: InnerOptimizer = "client"
    coral: CoralForm = "domainbed"

    not_for: ClassVar[frozenset[str]] = frozenset({LANGUAGE_MODELING})
    grouped: ClassVar[bool] = True

    @property
    def averages_rows(self) -> bool:
        return False  # the alignment compares statistics of a batch, and the first step uses all of its rows

    @property
    def needs_curvature(self) -> bool:
        return self.meta_update == "second_order"

    def check(self, model: Backbone) -> None:
        if self.align_weight:
            class_texts(model)  # raises where the class prompts depend on images

    def train(self, client: Client, sent: Broadcast) -> Update:
        optimizer = client.optimizer()
        texts = class_texts(client.model) if self.align_weight else None
        alignments: list[Tensor] = []
        for first, second in self._pairs(client):
            task = partial(self.loss, client, sent)
            aligned = partial(self.aligned_loss, client, sent, second, texts, alignments)
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
        metrics = {"train/alignment": float(torch.stack(alignments).mean())} if alignments else {}
        return client.update(metrics=metrics)

    def _pairs(self, client: Client) -> Iterator[tuple[Batch | None, Batch]]:
        """Pairs of batches for the two steps; the first is None where one ordinary step is taken.

        That is the case without meta-updates, and for a batch of one example, which cannot be halved.
        """
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
        alignments: list[Tensor],
    ) -> Tensor:
        """Task loss of a batch plus the alignment loss of its features.

        Args:
            client: The client; `client.model` is the model being trained.
            sent: Message from the server, with the global model.
            batch: Inputs and targets.
            texts: Features of the class prompts under the global model, shape (C, D), where these are
                aligned; None: image features are aligned.
            alignments: The alignment loss is appended, for the report.
        """
        x, y = batch
        model = client.model
        if not self.align_weight:
            return self.loss(client, sent, batch)
        if texts is not None:
            ours = model.class_features()
            theirs = texts
            task = client.objective.loss(model.head(model(x, headless=True), ours), y)
        elif model.exits is not None:  # models with several exits are not aligned
            return client.objective.loss(logits(model(x)), y)
        else:
            features = model(x, headless=True)
            ours = samples_of(features)
            task = client.objective.loss(model.classify(features), y)
            theirs = samples_of(global_features(client, sent, x)) if len(ours) > 1 else ours
        if len(ours) < 2:
            return task
        alignment: Tensor = coral(theirs, ours, self.coral)
        alignments.append(alignment.detach())
        return task + self.align_weight * alignment


def class_texts(model: Backbone) -> Tensor | None:
    """Features of the class prompts under the model as it is now, shape (C, D).

    None where image features are trained, which are aligned instead.

    Raises:
        ConfigError: A class has several prompts, or others for each image.
    """
    if not (model.text_is_live and model.net_is_frozen and model.adapter is None):
        return None
    return model.class_features().detach().clone()


def global_features(client: Client, sent: Broadcast, x: Tensor) -> Tensor:
    """Features of images under the received model, in evaluation mode."""
    client.model.eval()  # in training mode BatchNorm would change the statistics in `sent`
    try:
        features: Tensor = client.reference(sent.params, x, headless=True)
    finally:
        train_mode(client.model)
    return features


def coral(source: Array, target: Array, form: CoralForm = "domainbed") -> Array:
    """CORAL: distance between the means and covariances of two sets of features.

    DomainBed: mean over dimensions of the squared difference of means, plus mean over entries of the squared
    difference of covariances (with divisor n - 1). Sun and Saenko, Deep CORAL, 2016, Eq. 1: covariances only,
    over 4 D^2.

    Args:
        source: One feature vector per row, shape (n, D), n >= 2.
        target: The other set, shape (m, D), m >= 2.
        form: `domainbed` or `deep`.

    Raises:
        ValueError: A set has fewer than two rows, so that its covariance is undefined.
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


METHOD = Method(local=MetaLocal, knob=Knob("local.align_weight", 0.1, 10.0))
