"""Sums of weighted numbers that are never rounded, and their mean, which is rounded once.

A sum of floats depends on the order of its terms. Here it is held as whole multiples of fixed steps, 2^-18,
2^-52, 2^-86 and so on, one for every 34 bits. Most tensors need two of these lanes, others as many as their
values ask for. So it is the binned sum of Ahrens, Demmel and Nguyen (Algorithms for Efficient Reproducible
Floating Point Summation, ACM TOMS 2020), with fixed bins of which none is left out. Whole numbers are stored
in float64, whose additions are exact below 2^53. Every value is cut into multiples of steps, and these are
multiplied by digits of 14 bits of its weight. So matrix products are exact as well, in whatever order a
processor or a device adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import frexp
from typing import TypeAlias

import torch
from torch import Tensor

SPACING = 34
"""Bits of a value between two steps."""
FIRST = -18
"""Exponent of step 0; that of step j is FIRST - SPACING j, also for negative j."""
LAST = 22
"""Last step into which values are cut; only those of float64 reach it."""
LARGEST = 2.0**700
"""Larger values count as infinite; only float64 has them."""
DIGIT = 14
"""Bits of a weight in one factor of a product."""
AT_ONCE = 16
"""Clients in one matrix product, of at most 2^DIGIT 2^SPACING AT_ONCE = 2^52 steps."""
CAPACITY = 2**53 - 2**40
"""Steps in a lane; float64 counts up to 2^53, and `in_one_form` adds a few times 2^SPACING to them."""
CACHED = 2**16
"""Values, of all clients together, that are worked on at a time, so that they stay in a processor's cache."""
WHOLE = 1.5 * 2.0**52
"""A number of steps to which others can be added only rounded to whole ones."""
DOUBT = 2.0**-45
"""More than the relative error of a quotient in float64, before it is rounded to fewer bits."""

Lanes: TypeAlias = dict[tuple[int, int], Tensor]
"""Numbers of steps, shape (n,), by index j of the step and place p of the weights' digit: the value of one is
2^(FIRST - SPACING j + DIGIT p)."""


class ExactLanes:
    """Weighted sum of n numbers without rounding, and the sum of the weights.

    Attributes:
        size: The number n of sums.
        device: Where they are.
        mass: Sum of the weights of what was added.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device
        self.mass = Fraction(0)
        self._lanes: Lanes = {}
        self._steps = 0  # no number of steps is above it
        self._special: Tensor | None = None

    def add(self, rows: Sequence[Tensor], weights: Sequence[Fraction]) -> None:
        """Add rows of numbers, each of shape (n,), times one positive binary fraction each."""
        for begin in range(0, len(rows), AT_ONCE):
            some, shares = rows[begin : begin + AT_ONCE], weights[begin : begin + AT_ONCE]
            digits = digits_of(shares)
            self._make_room(2**SPACING * int(max(map(sum, digits.values()))))
            factors = torch.tensor([*digits.values()], dtype=torch.float64, device=self.device)
            width = max(CACHED // len(some), 1)
            for low in range(0, self.size, width):
                block = torch.stack([row[low : low + width] for row in some])
                if not largest(block) <= LARGEST:
                    block = self._without_special(low, block.double())
                for step, part in cut(block.double(), LAST):
                    scaled = factors / value_of((step, 0))
                    for place, product in zip(digits, scaled @ part, strict=True):
                        self._lane((step, place))[low : low + width] += product
        self.mass += sum(weights)

    def merge(self, other: ExactLanes) -> None:
        """Add another sum of as many numbers."""
        self._make_room(other._steps)
        for key, lane in other._lanes.items():
            self._lane(key).add_(lane)
        if other._special is not None:
            self._special = other._special + (0 if self._special is None else self._special)
        self.mass += other.mass

    def piece(self, begin: int, end: int) -> ExactLanes:
        """A copy of the sums from one index up to another."""
        part = ExactLanes(end - begin, self.device)
        part._lanes = {key: lane[begin:end].clone() for key, lane in self._lanes.items()}
        part._special = None if self._special is None else self._special[begin:end].clone()
        part.mass, part._steps = self.mass, self._steps
        return part

    def mean(self, dtype: torch.dtype) -> Tensor:
        """The sums divided by the sum of the weights, shape (n,), in a real floating-point type."""
        mean = torch.empty(self.size, dtype=dtype, device=self.device)
        for low in range(0, self.size, CACHED):
            part = slice(low, low + CACHED)
            lanes = in_one_form({key: lane[part] for key, lane in self._lanes.items()})
            values = [lane * value_of(key) for key, lane in sorted(lanes.items()) if lane.any()]
            mean[part] = rounded_quotient(values, self.mass, dtype) if values else 0.0
        if self._special is not None:
            mean = torch.where(self._special == 0, mean, self._special.to(dtype))
            mean[mean.isnan()] = torch.nan
        return mean

    def _without_special(self, low: int, block: Tensor) -> Tensor:
        """The values with 0 in place of NaN and infinity, which are added up apart."""
        special = ~(block.abs() <= LARGEST)
        if self._special is None:
            self._special = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        self._special[low : low + block.shape[1]] += (block * torch.inf).masked_fill(~special, 0.0).sum(0)
        return block.masked_fill(special, 0.0)

    def _lane(self, key: tuple[int, int]) -> Tensor:
        if key not in self._lanes:
            self._lanes[key] = torch.zeros(self.size, dtype=torch.float64, device=self.device)
        return self._lanes[key]

    def _make_room(self, steps: int) -> None:
        """Bring the numbers into the form in which they are small, if so many steps more may be too many."""
        if self._steps + steps > CAPACITY:
            self._lanes = in_one_form(self._lanes)
            self._steps = 2**SPACING
        self._steps += steps


def value_of(key: tuple[int, int]) -> float:
    """The value of one step of a lane."""
    step, place = key
    return 2.0 ** (FIRST - SPACING * step + DIGIT * place)


def digits_of(weights: Sequence[Fraction]) -> dict[int, list[float]]:
    """Digits of weights to the base 2^DIGIT by their place; places where all are 0 are left out.

    >>> digits_of([Fraction(3), Fraction(2**14 + 1)])
    {0: [3.0, 1.0], 1: [0.0, 1.0]}
    """
    lowest = max(-(-(weight.denominator.bit_length() - 1) // DIGIT) for weight in weights)
    whole = [int(weight * 2 ** (DIGIT * lowest)) for weight in weights]
    digits = {}
    for place in range(-(-max(whole).bit_length() // DIGIT)):
        row = [float((number >> DIGIT * place) % 2**DIGIT) for number in whole]
        if any(row):
            digits[place - lowest] = row
    return digits


def largest(values: Tensor) -> float:
    """The largest absolute value, or NaN if there is one."""
    return max(-float(values.amin()), float(values.amax()))


def cut(values: Tensor, last: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """Cut finite numbers in float64 into multiples of steps; overwrites the numbers by what is left.

    Args:
        values: The numbers.
        last: Step at which to end; None: when nothing is left.

    Yields:
        The index of the step, ascending, and the multiples, of at most 2^SPACING steps.
    """
    most = largest(values)
    first = step = (FIRST + SPACING - frexp(most)[1]) // SPACING
    while most and (last is None or step <= last):
        value = value_of((step, 0))
        part = (values + WHOLE * value).sub_(WHOLE * value)
        values.sub_(part)
        yield step, part
        if step > first:  # most values need two steps, so that a look after the first is in vain
            most = largest(values)
        step = max(step + 1, (FIRST + SPACING - frexp(most)[1]) // SPACING) if step > first else step + 1


def in_one_form(lanes: Mapping[tuple[int, int], Tensor]) -> Lanes:
    """The same sum in its only form with place 0 and numbers of steps from -1/2 up to 1/2 of 2^SPACING."""
    whole = {key: lane for key, lane in lanes.items() if not key[1]}
    for key, lane in lanes.items():
        if key[1]:
            for step, part in cut(lane * value_of(key)):
                number = part / value_of((step, 0))
                whole[step, 0] = whole[step, 0] + number if (step, 0) in whole else number
    step = max((step for step, _ in whole), default=0)
    while any(other <= step for other, _ in whole):
        if (step, 0) in whole:
            carry = (whole[step, 0] / 2**SPACING).add_(0.5).floor_()
            if carry.any():
                whole[step, 0] = whole[step, 0] - carry * 2**SPACING
                whole[step - 1, 0] = whole[step - 1, 0] + carry if (step - 1, 0) in whole else carry
        step -= 1
    return whole


def rounded_quotient(lanes: Sequence[Tensor], mass: Fraction, dtype: torch.dtype) -> Tensor:
    """The sum of lanes divided by a number, rounded to a type.

    Args:
        lanes: Values from the largest step to the smallest, as `in_one_form` leaves them, each of shape (n,).
        mass: The divisor.
        dtype: float64, in which the error is at most 0.51 units in the last place, or a type of fewer bits,
            in which the result is the nearest number, and of two the even one.
    """
    total, errors = lanes[-1], []
    for lane in reversed(lanes[:-1]):
        total, error = two_sum(lane, total)
        errors.append(error)
    rest = sum(errors, torch.zeros_like(total))
    divisor = float(mass)
    if dtype == torch.float64:
        quotient = total / divisor
        product, error = two_product(quotient, divisor)
        left = (total - product) - error + rest - quotient * float(mass - Fraction(divisor))
        return quotient + left / divisor
    quotient = (total / divisor).add_(rest.div_(divisor))
    result = narrow(quotient * (1 - DOUBT), dtype)
    other = narrow(quotient * (1 + DOUBT), dtype)
    doubtful = (result != other).nonzero()[:, 0]
    if len(doubtful):
        low, high = result[doubtful].double(), other[doubtful].double()
        middle = (low + high) / 2
        side = side_of([total[doubtful], *(error[doubtful] for error in errors)], middle, mass)
        larger, smaller = torch.maximum(low, high), torch.minimum(low, high)
        chosen = torch.where(side > 0, larger, torch.where(side < 0, smaller, middle))
        result[doubtful] = narrow(chosen, dtype)
    return result


def side_of(terms: Sequence[Tensor], middle: Tensor, mass: Fraction) -> Tensor:
    """The sign of the sum of terms minus a product, without rounding.

    Args:
        terms: Numbers in float64, each of shape (n,).
        middle: First factor, numbers of at most 25 bits, shape (n,).
        mass: Second factor.
    """
    divisor = float(mass)
    product, error = two_product(middle, divisor)
    left = torch.stack([*two_sum(terms[0], -product), -error, *terms[1:]])
    sign = left.sum(0).sign()  # that of a sum of two floats is right
    hard = (left != 0).sum(0) > 2 if Fraction(divisor) == mass else torch.ones_like(sign, dtype=torch.bool)
    for index in hard.nonzero()[:, 0].tolist():
        exact = sum(Fraction(float(term[index])) for term in terms) - mass * Fraction(float(middle[index]))
        sign[index] = (exact > 0) - (exact < 0)
    return sign


def narrow(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in float64 rounded once to the nearest of a type of at most 24 bits."""
    single = values.float()
    if dtype == torch.float32:
        return single
    # Of the two neighbours in float32 the odd one keeps the side on which a number of fewer bits lies.
    away = torch.where(values > single, torch.inf, -torch.inf).float()
    even = single.view(torch.int32) % 2 == 0
    moved = torch.where(even & (single != values) & single.isfinite(), torch.nextafter(single, away), single)
    return moved.to(dtype)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum of two numbers, and its error (Knuth)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def two_product(a: Tensor, b: float) -> tuple[Tensor, Tensor]:
    """The rounded product of two numbers, and its error (Dekker)."""
    product = a * b
    above = a * (2.0**27 + 1)
    a_high = above - (above - a)
    b_above = b * (2.0**27 + 1)
    b_high = b_above - (b_above - b)
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
