"""RayFed: federated tuning of foundation models, simulated on Ray.

`rayfed.simulate(["algorithm=fedprox", "rounds=5"])` runs one experiment and returns its `Result`;
`python -m rayfed.run` does the same from the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rayfed.config.schema import Config
    from rayfed.experiment.simulate import Result

__version__ = "0.1.0"


def simulate(config: Sequence[str] | Config = (), **options: Any) -> Result:
    """Run one experiment; see `rayfed.experiment.simulate.simulate`."""
    # A plain `import rayfed` stays light: torch and Ray are loaded here.
    from rayfed.experiment.simulate import simulate as run

    return run(config, **options)
