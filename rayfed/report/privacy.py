"""Guarantee of a run by differential privacy, as a note below its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WHERE = {
    "server": "noise added by the server to the mean",
    "client": "of one that takes part in every round; noise added by each client to its own answer",
}
"""Where the noise was added, by `privacy.noise_at`."""


def privacy_notes(config: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A note on the guarantee after the last finished round; nothing where no noise was added.

    Args:
        config: The config of the run.
        history: Its rows by round.
    """
    if not history or (epsilon := history[-1].get("epsilon")) is None:
        return
    section = config["privacy"]
    delta = history[-1].get("delta")  # earlier versions did not write it
    at = f" at delta {delta:.3g}" if delta is not None else ""
    yield (
        f"differential privacy of clients: epsilon {epsilon:.3g}{at} after round {history[-1]['round']}; "
        f"{WHERE[section['noise_at']]}; counted by {section['accountant']}; of this run alone, "
        f"and only towards those who do not know its seed: the noise is drawn from it"
    )
