"""Time of a round with clients of depth 12, 10, 8, 6, 4 and 3, compared with clients that all hold 12 blocks.

    python benchmarks/depth_cost.py [--repeats 7]

Six clients with the same number of images, one process, rounds of both kinds in turn. Prints the ratio of the
medians; it should be at most 1.15 x 43 / 72, the share of blocks.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median

from rayfed.config.schema import load_config
from rayfed.engine.loop import draw_cohort
from rayfed.executors.inline import InlineExecutor
from rayfed.experiment.plan import prepared

DEPTHS = [12, 10, 8, 6, 4, 3]
BAR = 1.15 * sum(DEPTHS) / (12 * len(DEPTHS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    common = ["data.domains=[plain]", "data.partition.clients_per_domain=6", "cluster=inline"]
    common += ["data.val=0", "model.pretrained=false"]
    kinds = {"mixed depths": ["algorithm=fedra", f"capacity={DEPTHS}"], "all large": ["algorithm=alllarge"]}
    setups = {name: prepared(load_config([*common, *overrides])) for name, overrides in kinds.items()}
    executors = {name: InlineExecutor(setup.context, setup.weights) for name, setup in setups.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(args.repeats + 1):
        for name, setup in setups.items():
            experiment = setup.experiment
            state = replace(experiment.server.start(setup.start), round=number)
            began = time.perf_counter()
            cohort = draw_cohort(experiment, executors[name], state)
            experiment.server.round(state, cohort, experiment.local)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        print(f"{name}: median {median(values):.3f} s, from {min(values):.3f} to {max(values):.3f}")
    ratio = median(seconds["mixed depths"]) / median(seconds["all large"])
    verdict = "held" if ratio <= BAR else "missed"
    print(f"ratio {ratio:.3f}; bar 1.15 x 43/72 = {BAR:.3f}: {verdict}")


if __name__ == "__main__":
    main()
