"""A network with BatchNorm layers whose parameters train."""

from rayfed.types import is_statistic

WITH_BATCH_NORM = (
    "model=resnet10t",
    "model.size=32",
    "model.options={}",
    "model.pretrained=false",
    "tuning=full",
    "data.limit=16",
    "rounds=2",
    "train.batch_size=8",
)


def statistics(run):
    """The running means and variances at the end of a run, by name."""
    return {name: value for name, value in run.params.items() if is_statistic(name)}
