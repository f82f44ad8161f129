"""Random allocation matrices of FedRA, which say which client holds which block. Uses numpy only."""

from collections.abc import Sequence
from functools import lru_cache
from math import comb
from typing import Literal

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.bool_]
Infeasible = Literal["cover_max", "eq3", "error"]


def draw_allocation(
    depths: Sequence[int], num_layers: int, rng: np.random.Generator, cover: bool = False
) -> Matrix:
    """A random allocation matrix, shape (clients, layers), with exactly depths[i] entries in row i.

    Su et al. [su2024fedra], section 3.5. Without `cover` each row is an independent uniform subset (Eq. 3: a
    layer that no client holds keeps its value). With `cover` the matrix is uniform over all matrices without
    an empty column (Eq. 4); where the depths sum to less than `num_layers`, rows are disjoint, which covers
    as many columns as possible.

    Args:
        depths: Number of layers each client holds.
        num_layers: Number of layers of the model.
        rng: Generator of the random numbers.
        cover: Every layer must be held by at least one client.

    Raises:
        ValueError: A depth outside 1..num_layers.
    """
    check_depths(depths, num_layers)
    if not cover:
        return draw_independent(depths, num_layers, rng)
    if sum(depths) < num_layers:
        return draw_disjoint(depths, num_layers, rng)
    return draw_covering(depths, num_layers, rng)


def check_depths(depths: Sequence[int], num_layers: int) -> None:
    """Check that all depths are whole numbers in 1..num_layers.

    Raises:
        ValueError: One is not; names the first such depth.
    """
    for depth in depths:
        if isinstance(depth, bool) or int(depth) != depth or not 1 <= depth <= num_layers:
            raise ValueError(f"depth {depth!r} is not a whole number of layers from 1 to {num_layers}")


def draw_independent(depths: Sequence[int], num_layers: int, rng: np.random.Generator) -> Matrix:
    """Allocation in which each row is an independent uniform subset of columns, of size depths[i]."""
    matrix = np.zeros((len(depths), num_layers), dtype=np.bool_)
    for row, depth in zip(matrix, depths, strict=True):
        row[rng.choice(num_layers, size=int(depth), replace=False)] = True
    return matrix


def draw_disjoint(
    depths: Sequence[int], num_layers: int, rng: np.random.Generator, last_round: Sequence[int] | None = None
) -> Matrix:
    """Allocation in which no two rows share a column, for depths that sum to at most `num_layers`.

    Args:
        depths: Row sums.
        num_layers: Number of columns.
        rng: Generator of the random numbers.
        last_round: Round in which each layer was trained last; the layers trained longest ago are chosen,
            ties at random. None: the choice of layers is uniform.
    """
    columns = rng.permutation(num_layers)
    if last_round is not None:
        columns = columns[np.argsort(np.asarray(last_round)[columns], kind="stable")]
    chosen = rng.permutation(columns[: sum(depths)])
    matrix = np.zeros((len(depths), num_layers), dtype=np.bool_)
    for row, part in zip(matrix, np.split(chosen, np.cumsum(depths)[:-1]), strict=True):
        row[part] = True
    return matrix


def count_covering(depths: Sequence[int], num_layers: int) -> list[list[int]]:
    """Number of ways to complete a covering matrix, as exact integers.

    Returns:
        Entry [i][u] counts the choices of rows i, i + 1, ... that together cover u columns which the rows
        before left uncovered. Entry [0][num_layers] is the number of matrices with these row sums and no
        empty column.
    """
    return _count(tuple(map(int, depths)), num_layers)


@lru_cache(maxsize=16)  # depths rarely change between rounds
def _count(depths: tuple[int, ...], num_layers: int) -> list[list[int]]:
    ways = [[1] + [0] * num_layers]
    for depth in reversed(depths):
        after = ways[0]
        ways.insert(0, [sum(_terms(u, depth, num_layers, after)) for u in range(num_layers + 1)])
    return ways


def _terms(uncovered: int, depth: int, num_layers: int, after: Sequence[int]) -> list[int]:
    """Number of ways in which a row covers s = 0..min(uncovered, depth) uncovered columns, for each s."""
    covered = num_layers - uncovered
    return [
        comb(uncovered, s) * comb(covered, depth - s) * after[uncovered - s]
        for s in range(min(uncovered, depth) + 1)
    ]


def draw_covering(depths: Sequence[int], num_layers: int, rng: np.random.Generator) -> Matrix:
    """A uniform draw from all matrices with these row sums and no empty column, without rejection sampling.

    Row by row, the number of newly covered columns is drawn with the exact probabilities of `count_covering`.

    Raises:
        ValueError: There is no such matrix.
    """
    ways = count_covering(depths, num_layers)
    if not ways[0][num_layers]:
        raise ValueError(f"depths {list(depths)} cannot cover {num_layers} layers")
    matrix = np.zeros((len(depths), num_layers), dtype=np.bool_)
    is_covered = np.zeros(num_layers, dtype=np.bool_)
    for i, depth in enumerate(depths):
        new = np.flatnonzero(~is_covered)
        old = np.flatnonzero(is_covered)
        s = _pick(_terms(len(new), int(depth), num_layers, ways[i + 1]), rng)
        matrix[i, rng.choice(new, size=s, replace=False)] = True
        matrix[i, rng.choice(old, size=int(depth) - s, replace=False)] = True
        is_covered |= matrix[i]
    return matrix


def _pick(counts: Sequence[int], rng: np.random.Generator) -> int:
    """A random index with probability exactly proportional to its count, an integer of any size."""
    total = sum(counts)
    bits = total.bit_length()
    while (value := int.from_bytes(rng.bytes(-(-bits // 8)), "big") >> (-bits % 8)) >= total:
        pass
    for index, count in enumerate(counts):
        value -= count
        if value < 0:
            return index
    raise ValueError("all counts are zero")
