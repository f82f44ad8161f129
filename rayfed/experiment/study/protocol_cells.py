"""Replaces cells whose experiments have a protocol by its runs, each a cell with the coordinate `part`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rayfed.config.variants import PROTOCOLS
from rayfed.engine.built_once import Memo
from rayfed.errors import ConfigError
from rayfed.experiment.plan import protocol_runs
from rayfed.experiment.study.coordinates import PART, SEED, Key

if TYPE_CHECKING:
    from rayfed.config.schema import Config, Request


@dataclass(frozen=True, kw_only=True)
class ProtocolCells:
    """The runs of the protocol of a study's cells.

    Attributes:
        names: Names of the coordinates, with `part` before `seed`.
        configs: The runs by coordinates.
        cell_of: By the coordinates of a run those of the cell that it is a part of.
        scores: By the coordinates of a run that trains nothing those of the run whose final model it scores.
    """

    names: tuple[str, ...]
    configs: Mapping[Key, Config]
    cell_of: Mapping[Key, Key]
    scores: Mapping[Key, Key] = field(default_factory=dict)


def protocol_of(configs: Mapping[Key, Request]) -> str:
    """The protocol of all cells of a study.

    Raises:
        ConfigError: They have different ones.
    """
    protocols = {config.protocol for config in configs.values()}
    if len(protocols) > 1:
        raise ConfigError(
            f"protocol: cells of one study have the same one, here {', '.join(sorted(protocols))}"
        )
    return next(iter(protocols))


def protocol_cells(configs: Mapping[Key, Request], names: tuple[str, ...], shared: Memo) -> ProtocolCells:
    """The runs of the protocol of cells.

    Args:
        configs: The cells, all with one protocol.
        names: Names of their coordinates, without `part`.
        shared: What was made for other experiments.

    Raises:
        ConfigError: The protocol has no runs on these data.
    """
    at = names.index(SEED) if SEED in names else len(names)
    runs: dict[Key, Config] = {}
    cell_of: dict[Key, Key] = {}
    scores: dict[Key, Key] = {}
    for key, config in configs.items():
        first: Key | None = None
        for part, run in protocol_runs(config, shared).items():
            own = (*key[:at], part, *key[at:])
            runs[own], cell_of[own] = run, key
            if first is None:
                first = own
            elif PROTOCOLS[config.protocol].scores_first:
                scores[own] = first
                # The folder of the study, until the cell whose model is scored has one.
                runs[own] = replace(run, evaluation=replace(run.evaluation, model_of=run.output))
    return ProtocolCells(names=(*names[:at], PART, *names[at:]), configs=runs, cell_of=cell_of, scores=scores)
