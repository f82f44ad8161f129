"""Calls in this process: the watchdog watches every call, also those of clients that share their passes."""

import faulthandler
from dataclasses import replace

import pytest

from rayfed.engine.loop import run_rounds
from rayfed.executors.inline import InlineExecutor
from rayfed.federation.executor import Policy
from rayfed.testing import small_setup


@pytest.mark.parametrize(("group", "units"), [(1, 4), (2, 2)])
def test_the_watchdog_begins_anew_with_every_call_and_every_group(group, units, monkeypatch):
    limits = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda limit, file: limits.append(limit))
    setup = small_setup(
        "algorithm=fedavg", "data.domains=[plain,street]", "data.partition.clients_per_domain=2"
    )
    experiment = replace(setup.experiment, group=group, rounds=1, evaluate_every=0)
    list(
        run_rounds(
            experiment, InlineExecutor(setup.context, setup.weights, Policy(watchdog=300.0)), setup.start
        )
    )
    assert limits == [300.0] * units
