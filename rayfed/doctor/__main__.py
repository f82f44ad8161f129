"""python -m rayfed.doctor: what an experiment needs, what there is, and whether it fits; runs no round."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import traceback
from collections.abc import Mapping, Sequence

from rayfed.doctor.diagnosis import Diagnosis, diagnose
from rayfed.documents import to_json
from rayfed.errors import ConfigError, RayFedError, one_line
from rayfed.terminal.arguments import Arguments
from rayfed.terminal.console import say, size

USAGE = """\
python -m rayfed.doctor [overrides] [--config FILE] [--json] [--debug]

Takes the overrides of rayfed.run. Prepares the data as a run would, plays one client in a process of its own,
and says what the cluster has, what the config needs and how long a round may take. Exit code: 0 it fits,
1 the client failed, 2 bad input, or it does not fit.
"""


def report(found: Diagnosis) -> str:
    """A diagnosis for people."""
    m, e, d = found.measured, found.estimate, found.disk
    share = f" and {found.gpus_per_actor:.3g} GPU" if found.gpus_per_actor else ""
    actors = f"{found.actors} client actors with {found.cpus_per_actor:.3g} CPU{share} each"
    if not found.cpus_per_actor:
        actors = "one process" if found.actors else "no plan of client actors fits"
    on_gpu = f", {size(m.device_bytes)} on {m.device}" if m.device_bytes else ""
    lines = [
        ("experiment", found.experiment),
        ("cluster", found.cluster),
        *(("", _node(node)) for node in found.nodes),
        ("needs", f"{actors}; {size(found.memory_per_actor)} set aside for one (cluster.memory_per_actor)"),
        ("measured", f"client {m.client} with {m.examples} training images, on {m.device}, on this machine"),
        ("", f"memory of one actor {size(m.memory_bytes)}{on_gpu}; weights {size(m.weights_bytes)} a node"),
        ("", f"a visit {m.first_visit_s:.2f} s in the first round, {m.visit_s:.2f} s later"),
        ("", f"scoring {m.scored} images {m.scoring_s:.2f} s; the server {m.server_s:.2f} s"),
        (
            "estimate",
            f"a round {_time(e.round_s)} (the first {_time(e.first_round_s)}), all {_time(e.total_s)}",
        ),
        ("", "from that one client, if actors are as fast and do not slow each other down"),
        ("disk", f"{d.output}: {size(d.checkpoint_bytes)} a checkpoint; {size(d.output_free_bytes)} free"),
        ("", f"prepared images: {size(d.shard_bytes)} in {d.shard}"),
        ("verdict", "does not fit" if found.problems else "fits"),
        *(("advice", text) for text in found.advice),
    ]
    return "\n".join(f"{title:<12}{text}" for title, text in lines)


def _node(node: Mapping[str, float]) -> str:
    memory = f"{size(node.get('memory', 0))} memory, {size(node.get('object_store_memory', 0))} object store"
    return f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU, {memory}"


def _time(seconds: float) -> str:
    """Seconds as they are read best.

    >>> _time(0.123), _time(61), _time(7200)
    ('0.12 s', '61 s', '2.0 h')
    """
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line. Exit code: 0 fits, 1 a client failed, 2 bad input or does not fit."""
    parser = Arguments("rayfed.doctor", usage=USAGE)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--config", help="a resolved config to start from, such as a run's config.yaml")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    args = parser.read(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in a run, for equal speed
    from rayfed.config.schema import load_config

    try:
        found = diagnose(load_config(args.overrides, args.config))
    except RayFedError as err:
        if args.debug:
            traceback.print_exc()
        say(f"error: {one_line(err)}", sys.stderr)
        return 2 if isinstance(err, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    say(to_json(dataclasses.asdict(found), indent=1) if args.json else report(found))
    for problem in found.problems:
        say(f"error: {problem}", sys.stderr)
    return 2 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
