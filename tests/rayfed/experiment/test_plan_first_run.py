"""The first run of a protocol, which stands for all of them where one is measured."""

from rayfed.config.schema import load_config
from rayfed.experiment.plan import first_run


def test_the_first_run_of_a_protocol_or_the_experiment_itself():
    single = load_config(["data.shots=2"])
    assert first_run(single) == single.alone()
    few = first_run(load_config(["protocol=few_shot", "data.shots=[3,1]"]))
    assert few.data.shots == 3
