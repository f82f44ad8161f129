"""PromptFL: learned context vectors of the class prompts of a frozen CLIP model, averaged by FedAvg.

Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, IEEE TMC 2023
[guo2023promptfl], Algorithm 1: FedAvg of the context of CoOp (`tuning=text_prompt`), with cross entropy over
the class prompts.

Differs from the released code, which never empties its list of local models and therefore averages the models
of all rounds so far.
"""

from rayfed import Method

METHOD = Method(knob="it has no hyperparameter")
