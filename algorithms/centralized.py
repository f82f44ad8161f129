"""Centralized: training on the pooled data of all clients, as a reference without privacy.

It is FedAvg with one client: `configs/algorithm/centralized.yaml` sets `data.partition.pooled`.
"""

from rayfed.federation.method import Method

METHOD = Method()
