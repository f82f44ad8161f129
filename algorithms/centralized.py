"""Centralized: training on the pooled data of all clients, as a reference without privacy.

It is FedAvg with one client: `configs/algorithm/centralized.yaml` sets `data.partition.pooled`.
McMahan et al. [mcmahan2017fedavg], section 3, compare with it as SGD on the whole training set.
"""

from rayfed import Method

METHOD = Method(knob="it has no hyperparameter")
