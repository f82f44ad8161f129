"""FedAvg: weighted mean of locally trained parameters; both halves are the defaults.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017
[mcmahan2017fedavg], Algorithm 1.
"""

from rayfed import Method

METHOD = Method(knob="it has no hyperparameter")
