"""A method of one's own: a server rule that takes half a step, and a local loss with a pull."""

from rayfed import Experiment, Local, Server


class HalfStep(Server):
    step: float = 0.5

    def aggregate(self, state, cohort, updates):
        new = super().aggregate(state, cohort, updates)
        mixed = {n: v + self.step * (new.params[n] - v) for n, v in state.params.items()}
        return type(new)(round=new.round, params=mixed)


class Pull(Local):
    mu: float = 0.1

    def loss(self, client, sent, batch):
        far = sum((p - sent.params[n]).pow(2).sum() for n, p in client.trainable().items())
        return super().loss(client, sent, batch) + self.mu * far


data = {"name": "digits_five_mini", "limit": 24}
experiment = Experiment(method=(HalfStep, Pull), data=data, tuning="lora", rounds=2)
