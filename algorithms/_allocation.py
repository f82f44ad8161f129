"""Random allocation matrices: who holds which block (FedRA). Pure numpy."""

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
    """A random allocation, shape (clients, layers), whose row i has exactly depths[i] entries.

    Su et al., FedRA: A Random Allocation Strategy for Federated Tuning to Unleash the Power of Heterogeneous
    Clients, ECCV 2024, section 3. Without `cover` each row is a uniform subset, independently (Eq. 3: a layer
    nobody holds keeps its value). With `cover` the matrix is uniform over all those without an empty column
    (Eq. 4); where the depths sum to less than `num_layers`, rows are disjoint, which covers as much as
    possible.

    Args:
        depths: Layers each client can hold.
        num_layers: Layers there are.
        rng: Private generator.
        cover: Every layer must have a holder.

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
    """Raise ValueError, naming the first depth that is not a whole number in 1..num_layers."""
    for depth in depths:
        if isinstance(depth, bool) or int(depth) != depth or not 1 <= depth <= num_layers:
            raise ValueError(f"depth {depth!r} is not a whole number of layers from 1 to {num_layers}")


def draw_independent(depths: Sequence[int], num_layers: int, rng: np.random.Generator) -> Matrix:
    """Every row a uniform subset of its size, independently."""
    matrix = np.zeros((len(depths), num_layers), dtype=np.bool_)
    for row, depth in zip(matrix, depths, strict=True):
        row[rng.choice(num_layers, size=int(depth), replace=False)] = True
    return matrix


def draw_disjoint(
    depths: Sequence[int], num_layers: int, rng: np.random.Generator, last_round: Sequence[int] | None = None
) -> Matrix:
    """Rows without a common column, for depths that sum to at most `num_layers`.

    Args:
        depths: Row sums.
        num_layers: Columns.
        rng: Private generator.
        last_round: When each layer was trained last; with it the columns covered are those trained longest
            ago, ties at random. Without it they are a uniform choice.
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
    """Ways to finish: entry [i][u] counts the rows i.. that cover u still uncovered columns, exactly.

    Entry [0][num_layers] is the number of matrices with these row sums and no empty column.
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
    """Ways by the number s of uncovered columns that this row covers, s = 0..min(uncovered, depth)."""
    covered = num_layers - uncovered
    return [
        comb(uncovered, s) * comb(covered, depth - s) * after[uncovered - s]
        for s in range(min(uncovered, depth) + 1)
    ]


def draw_covering(depths: Sequence[int], num_layers: int, rng: np.random.Generator) -> Matrix:
    """Uniform over the matrices with these row sums and no empty column: by counting, without rejection.

    Raises:
        ValueError: There is no such matrix.
    """
    ways = count_covering(depths, num_layers)
    if not ways[0][num_layers]:
        raise ValueError(f"depths {list(depths)} cannot cover {num_layers} layers")
    matrix = np.zeros((len(depths), num_layers), dtype=np.bool_)
    is_covered = np.zeros(num_layers, dtype=np.bool_)
    for i, depth in enumerate(depths):
        new, old = np.flatnonzero(~is_covered), np.flatnonzero(is_covered)
        s = _pick(_terms(len(new), int(depth), num_layers, ways[i + 1]), rng)
        matrix[i, rng.choice(new, size=s, replace=False)] = True
        matrix[i, rng.choice(old, size=int(depth) - s, replace=False)] = True
        is_covered |= matrix[i]
    return matrix


def _pick(counts: Sequence[int], rng: np.random.Generator) -> int:
    """An index with probability proportional to whole numbers of any size, exactly."""
    total = sum(counts)
    bits = total.bit_length()
    while (value := int.from_bytes(rng.bytes(-(-bits // 8)), "big") >> (-bits % 8)) >= total:
        pass
    for index, count in enumerate(counts):
        value -= count
        if value < 0:
            return index
    raise ValueError("there is nothing to pick from")
