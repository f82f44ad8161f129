"""PromptFL: clients learn the words of a CLIP model's class prompts, both of its towers being frozen.

Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models, IEEE TMC 2023:
FedAvg of the context of CoOp (`tuning=text_prompt`), with cross entropy over the class prompts.

Differs from the released code, which never empties its list of local models, so that a round averages those
of all rounds before it.
"""

from rayfed.federation.method import Method

METHOD = Method()
