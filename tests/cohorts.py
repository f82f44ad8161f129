"""Cohorts of rounds for tests."""

from rayfed.engine.loop import RoundPlan, draw_cohort
from rayfed.federation.cohort import Cohort
from rayfed.types import ServerState


def make_cohort(experiment: RoundPlan, executor: object, round: int) -> Cohort:
    """The cohort that a rule without questions draws for a round."""
    return draw_cohort(experiment, executor, ServerState(round=round, params={}))
