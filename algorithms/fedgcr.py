"""FedGCR: group customization at the clients and group reweighting on the server.

Cheng, Yeh, Chen, Pastor, Chen, FedGCR, AAAI 2024 [cheng2024fedgcr], section 3 and Algorithm 1.
"""

from algorithms._grouping import client_representation
from algorithms.fedgc import GroupCustomization, group_customization_loss, representation_alignment_loss
from algorithms.fedgr import GroupReweighting, beta, group_weights
from rayfed import Knob, Method

__all__ = [
    "METHOD",
    "beta",
    "client_representation",
    "group_customization_loss",
    "group_weights",
    "representation_alignment_loss",
]

METHOD = Method(server=GroupReweighting, local=GroupCustomization, knob=Knob("server.delta", 0.1, 0.9))
