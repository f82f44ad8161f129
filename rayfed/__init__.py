"""RayFed: federated tuning of foundation models, simulated on Ray.

`rayfed.simulate(["algorithm=fedprox", "rounds=5"])` runs one experiment and returns its `Result`;
`python -m rayfed.run` does the same from the command line. A method is written with the other names of
`__all__` (CONTRIBUTING.md). They are imported when they are first used, so that `import rayfed` alone loads
neither torch nor Ray; `__init__.pyi` has their types.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "Broadcast": "rayfed.types",
    "Client": "rayfed.federation.client",
    "Cohort": "rayfed.federation.cohort",
    "Local": "rayfed.federation.local",
    "Method": "rayfed.federation.method",
    "Server": "rayfed.federation.server",
    "ServerState": "rayfed.types",
    "Update": "rayfed.types",
    "simulate": "rayfed.experiment.simulate",
}
"""Where each public name is defined."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
