"""FFT-GP: fairness-aware aggregation (FAA) with local meta-learning and alignment (BGP).

Zhang, Fan, Yao, Zhang, Wang, FFT-GP, FITEE 2024 [zhang2024fftgp], section 3.3, Algorithms 1 and 2: the server
of `faa` with the clients of `bgp`, on any backbone.
"""

from algorithms.bgp import MetaLocal, coral
from algorithms.faa import FairnessAware, fairness_aware_weights
from rayfed import Knob, Method

__all__ = ["METHOD", "coral", "fairness_aware_weights"]

METHOD = Method(server=FairnessAware, local=MetaLocal, knob=Knob("server.step", 0.05, 0.8))
