"""RayFed: federated tuning of foundation models, simulated on Ray.

What the author of a method needs can be imported from here: `from rayfed import Local, Method, Server`.
`rayfed.simulate(["algorithm=fedprox", "rounds=5"])` runs one experiment and returns its `Result`;
`python -m rayfed.run` does the same from the command line.

Names are imported when they are first used, so that `import rayfed` loads neither torch nor Ray. Their types
are in `__init__.pyi`.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_HOME = {
    "Broadcast": "rayfed.types",
    "Client": "rayfed.federation.client",
    "Cohort": "rayfed.federation.cohort",
    "Local": "rayfed.federation.local",
    "Method": "rayfed.federation.method",
    "Server": "rayfed.federation.server",
    "ServerState": "rayfed.types",
    "Update": "rayfed.types",
    "is_statistic": "rayfed.types",
    "simulate": "rayfed.experiment.simulate",
}
"""The module that defines each public name."""

__all__ = [
    "Broadcast",
    "Client",
    "Cohort",
    "Local",
    "Method",
    "Server",
    "ServerState",
    "Update",
    "__version__",
    "is_statistic",
    "simulate",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'rayfed' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
