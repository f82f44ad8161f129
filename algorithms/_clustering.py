"""Clustering of vectors by Gaussian mixture, k-means or first neighbours (FINCH), and cluster purity."""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.float64]
Labels: TypeAlias = npt.NDArray[np.int64]
Clustering: TypeAlias = Literal["gmm", "kmeans", "finch"]

log = logging.getLogger(__name__)


def cluster(h: Matrix, num_clusters: int, kind: Clustering, seed: int) -> Labels:
    """Cluster label of every row; labels are 0, 1, ... in the order of first appearance.

    Args:
        h: One vector per row, shape (K, D).
        num_clusters: Number of clusters, at most K. finch chooses the number itself.
        kind: gmm: scikit-learn's Gaussian mixture with full covariances; kmeans: its k-means with 10
            initializations; finch: the first partition of Sarfraz et al., Efficient Parameter-free Clustering
            Using First Neighbor Relations, CVPR 2019.
        seed: Seed of the initializations.

    Raises:
        ValueError: An entry of h is not finite.
    """
    h = np.asarray(h, dtype=np.float64)
    if not np.isfinite(h).all():
        raise ValueError("representations must be finite")
    wanted = min(num_clusters, len(h))
    if kind == "finch":
        return renumber(finch(h))
    if wanted == 1:
        return np.zeros(len(h), dtype=np.int64)
    reduced = reduce_exactly(h)
    return renumber(_kmeans(reduced, wanted, seed) if kind == "kmeans" else _gmm(reduced, wanted, seed))


def reduce_exactly(h: Matrix) -> Matrix:
    """Coordinates in the span of the centred rows, shape (K, rank); all distances between rows are kept.

    A mixture fitted to them has the same responsibilities as one fitted in the full space: the data do not
    vary in the directions left out, which add the same regularized variance to every component.
    """
    centred = h - h.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    rank = max(int((sizes > sizes[0] * 1e-12).sum()), 1)
    return np.ascontiguousarray(left[:, :rank] * sizes[:rank])


def _gmm(h: Matrix, num_clusters: int, seed: int) -> Labels:
    from sklearn.mixture import GaussianMixture

    for floor in (1e-6, 1e-4, 1e-2):
        model = GaussianMixture(num_clusters, reg_covar=floor, random_state=seed % 2**32)
        try:
            return _quietly(lambda model=model: model.fit_predict(h))  # type: ignore[misc]
        except ValueError as err:  # a covariance that is not positive definite
            log.info("mixture with reg_covar=%g failed (%s)", floor, err)
    return _kmeans(h, num_clusters, seed)


def _kmeans(h: Matrix, num_clusters: int, seed: int) -> Labels:
    from sklearn.cluster import KMeans

    return _quietly(lambda: KMeans(num_clusters, n_init=10, random_state=seed % 2**32).fit_predict(h))


def _quietly(compute: Callable[[], Labels]) -> Labels:
    """Compute labels on one thread, so that sums do not depend on the machine, and without warnings.

    The suppressed ConvergenceWarning is about fewer distinct points than clusters.
    """
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return compute()


def finch(h: Matrix) -> Labels:
    """First partition of FINCH: connected components of the graph of nearest neighbours by cosine."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if len(h) == 1:
        return np.zeros(1, dtype=np.int64)
    unit = h.astype(np.float32)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = similarity.argmax(axis=1)
    graph = coo_array((np.ones(len(h)), (np.arange(len(h)), nearest)), shape=(len(h), len(h)))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def renumber(labels: npt.NDArray[np.integer]) -> Labels:
    """The same clusters, with labels 0, 1, ... in the order of first appearance."""
    number = {label: i for i, label in enumerate(dict.fromkeys(labels.tolist()))}
    return np.array([number[label] for label in labels.tolist()], dtype=np.int64)


def purity(labels: Sequence[int], types: Sequence[Hashable]) -> float:
    """Share of members whose true type is the most frequent type of their cluster.

    Args:
        labels: Cluster of each member.
        types: True type of each member.
    """
    groups: dict[int, Counter[Hashable]] = {}
    for label, kind in zip(labels, types, strict=True):
        groups.setdefault(int(label), Counter())[kind] += 1
    return sum(max(count.values()) for count in groups.values()) / len(labels)
