"""The main hyperparameter of a method, which is tuned besides the rate of the clients (`rayfed.tuned`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rayfed.errors import ConfigError


@dataclass(frozen=True)
class Knob:
    """A hyperparameter, and the range in which its value is searched.

    Attributes:
        key: Its key, such as `local.mu` or `server.lr`.
        low, high: Ends of the range, both positive: its logarithm is divided evenly. Of two whole numbers,
            whole numbers are tried.
    """

    key: str
    low: float
    high: float

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ConfigError: It is empty, or an end is no positive number.
        """
        ends = (self.low, self.high)
        if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends) or not (
            0 < self.low < self.high < math.inf
        ):
            raise ConfigError(
                f"knob: {self.key}: {self.low!r} to {self.high!r} is no range of positive numbers, such as "
                f"0.01 to 1"
            )

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def values(self, number: int) -> list[float]:
        """Values at equal ratios, both ends included; of one value the middle. Equal ones are named once.

        >>> Knob("local.mu", 0.01, 1.0).values(3), Knob("local.head_passes", 1, 4).values(5)
        ([0.01, 0.1, 1.0], [1, 2, 3, 4])
        """
        shares = [0.5] if number == 1 else [place / (number - 1) for place in range(number)]
        raw = [self.low * (self.high / self.low) ** share for share in shares]
        kept = [round(value) if self.is_whole else plain_number(value) for value in raw]
        return list(dict.fromkeys(kept))

    def is_end(self, value: object) -> bool:
        """Whether a value is an end of the range, or beyond it."""
        inside = self.low * (1 + 1e-9), self.high * (1 - 1e-9)
        return isinstance(value, int | float) and not inside[0] < value < inside[1]


def plain_number(value: float) -> float:
    """A number with three significant digits, as tables show it."""
    return float(f"{value:.3g}")


def check_knob(knob: Knob, server: type, local: type) -> None:
    """Check that a hyperparameter is one of these halves.

    Raises:
        ConfigError: It is not.
    """
    half = knob.key.partition(".")[0]
    kinds = {"server": server, "local": local}
    known = {f"{key}.{each.name}" for key, kind in kinds.items() for each in fields(kind)}
    if knob.key not in known:
        of = kinds[half].__name__ if half in kinds else "the method"
        raise ConfigError(f"knob: {knob.key!r} is no hyperparameter of {of}; write for example local.mu")
