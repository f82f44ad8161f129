"""RayFed: federated tuning of foundation models, simulated on Ray.

What the author of a method needs can be imported from here: `from rayfed import Local, Method, Server`.
`rayfed.Experiment(method="fedprox", rounds=5).run()` runs one experiment, with names or objects for its
parts, and returns its `Run`; `python -m rayfed.run` does the same from the command line.

Names are imported when they are first used, so that `import rayfed` loads neither torch nor Ray. Their types
are in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

__version__ = "0.1.0"

_NEEDED = ("numpy", "torch", "yaml")
"""Libraries without which nothing works. A command needs Ray too; one process alone does without it."""

_COMMAND = sys.argv[:1] == ["-m"]
"""Python looks for the module of a command, and imports its package first."""

if _missing := [name for name in (*_NEEDED, *["ray"] * _COMMAND) if find_spec(name) is None]:
    _MESSAGE = (
        f"{sys.executable} does not have {', '.join(_missing)}; in a checkout, `make run` installs them into "
        f".venv: use .venv/bin/python, or activate it with `. .venv/bin/activate`"
    )
    if _COMMAND:
        sys.stderr.write(f"error: {_MESSAGE}\n")
        raise SystemExit(2)
    raise ImportError(_MESSAGE)

_HOME = {
    "Broadcast": "rayfed.types",
    "Client": "rayfed.federation.client",
    "Cohort": "rayfed.federation.cohort",
    "Experiment": "rayfed.experiment.experiment",
    "Knob": "rayfed.federation.knob",
    "LoRA": "rayfed.tuning.lora",
    "Local": "rayfed.federation.local",
    "Method": "rayfed.federation.method_registry",
    "Model": "rayfed.models.user_model",
    "Partition": "rayfed.data.partition_config",
    "Run": "rayfed.experiment.finished_run",
    "Server": "rayfed.federation.server",
    "ServerState": "rayfed.types",
    "Study": "rayfed.experiment.study.cells",
    "Task": "rayfed.objective",
    "Update": "rayfed.types",
    "compare": "rayfed.experiment.compare_and_sweep",
    "grid": "rayfed.experiment.compare_and_sweep",
    "is_statistic": "rayfed.types",
    "load": "rayfed.experiment.load",
    "simulate": "rayfed.experiment.experiment",
    "sweep": "rayfed.experiment.study.search",
    "tuned": "rayfed.experiment.tuned",
}
"""The module that defines each public name."""

__all__ = [
    "Broadcast",
    "Client",
    "Cohort",
    "Experiment",
    "Knob",
    "LoRA",
    "Local",
    "Method",
    "Model",
    "Partition",
    "Run",
    "Server",
    "ServerState",
    "Study",
    "Task",
    "Update",
    "__version__",
    "compare",
    "grid",
    "is_statistic",
    "load",
    "simulate",
    "sweep",
    "tuned",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rayfed' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
