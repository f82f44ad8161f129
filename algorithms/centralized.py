"""Centralized: FedAvg with one client that owns the pooled data; the reference row without privacy.

The pooling is a property of the partition: `configs/algorithm/centralized.yaml` sets `data.partition.pooled`.
"""

from rayfed.federation.method import Method

METHOD = Method()
