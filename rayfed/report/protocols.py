"""The tables of all protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rayfed.config.schema import Config
from rayfed.report import few_shot, generalization, leave_one_out, unseen_clients
from rayfed.report.leave_one_out import Tables

TABLES: Mapping[str, Callable[[Config, Mapping[str, Path]], Tables]] = {
    "leave_one_out": leave_one_out.leave_one_out_table,
    "few_shot": few_shot.few_shot_table,
    "unseen_clients": unseen_clients.unseen_clients_table,
    "cross_domain": generalization.by_domain,
    "base_to_new": generalization.by_classes,
    "cross_dataset": generalization.by_data_set,
}
"""By name of the protocol: its tables, from the config of all runs and the folders of the finished ones."""
