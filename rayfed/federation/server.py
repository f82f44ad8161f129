"""The server half of a method. Overriding nothing gives FedAvg's weighted mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from rayfed.federation.aggregation import (
    EXACT,
    LoraRule,
    Weighting,
    before_division,
    client_weights,
    exact_mean,
    mean_by_name,
    product_mean,
)
from rayfed.federation.client_tasks import fit
from rayfed.federation.cohort import TRAINING, Cohort
from rayfed.federation.executor import ClientTask
from rayfed.federation.local import Local
from rayfed.federation.params import without_statistics
from rayfed.types import Broadcast, Params, ServerState, Update

STEP = "step"
"""Name in `ServerState.memory` of what `Server.take_step` keeps, by its names and then by tensor."""


@dataclass(frozen=True)
class Server:
    """Server rule. Holds hyperparameters only; what must be remembered is kept in `ServerState`.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017,
    Algorithm 1.

    Attributes:
        weighting: Weight of a client in the mean: its number of training examples, the same for all, or the
            tokens that a language model learned in its training batches.
        lora_agg: How LoRA factors are combined: the mean of each factor, the best approximation of the mean
            product at the same rank, or that mean exactly (`rayfed.federation.aggregation`).
        offers: Names of what this half puts into `shared`.
        needs: Names that the server, the local half or the tuning must offer; checked before the run.
        tuning: Options of the tuning scheme that this half sets, by name, whatever the config says. A half
            that sets one also needs a scheme that has it.
        by_block: Whether the method needs a backbone whose blocks can be left out.
        blocks_optional: With `by_block`: a backbone without such blocks will do where no client has a
            `capacity`, as all clients hold all of it then.
        tasks: Tasks this half can be used for (`rayfed.objective`); empty: all.
        trains: Whether rounds change the model; if not, comparisons run one round only.
        sent_tensors_only: The new tensors depend on nothing of the answers but the tensors in them, although
            the class overrides more than `take_step`; noise at the client is refused otherwise.
    """

    weighting: Weighting = "data_size"
    lora_agg: LoraRule = "factor_mean"

    offers: ClassVar[frozenset[str]] = frozenset()
    needs: ClassVar[frozenset[str]] = frozenset()
    tuning: ClassVar[Mapping[str, object]] = {}
    by_block: ClassVar[bool] = False
    blocks_optional: ClassVar[bool] = False
    tasks: ClassVar[frozenset[str]] = frozenset()
    trains: ClassVar[bool] = True
    sent_tensors_only: ClassVar[bool] = False

    def check(self, clients: int) -> None:
        """Check before a run that this half can combine the answers of a round.

        What can be done, but is probably not meant, is said in a warning of `logging`.

        Args:
            clients: Number of clients in a round, or the expected one, where no client is missing.

        Raises:
            ConfigError: It cannot; names the key, its value and what is allowed.
        """

    def start(self, params: Params) -> ServerState:
        """The state before the first round, from the initial values."""
        return ServerState(round=0, params=params)

    def round(self, state: ServerState, cohort: Cohort, local: Local) -> ServerState:
        """One communication round: any number of exchanges with clients; returns the next state."""
        state = local.exchange(state, cohort)
        updates = cohort.run(self.training_task(local), self.send(state, cohort), tag=TRAINING)
        return self.aggregate(state, cohort, updates)

    def training_task(self, local: Local) -> ClientTask:
        """The task of the training exchange; override it to have models scored before or after training."""
        return partial(fit, local=local)

    def send(self, state: ServerState, cohort: Cohort) -> Mapping[str, Broadcast]:
        """The message to each client for training, by id: the first blocks, as many as it can hold."""
        return {cid: state.broadcast(blocks=cohort.prefix(cid)) for cid in cohort.ids}

    def aggregate(self, state: ServerState, cohort: Cohort, updates: Sequence[Update]) -> ServerState:
        """Combine the trained updates into the next state; may run further exchanges.

        Args:
            state: State before the round.
            cohort: Clients of the round.
            updates: Answers in the order of the cohort. Clients may be missing, here and in later exchanges,
                so match answers to clients by `Update.client`.
        """
        weights = self.base_weights(updates)
        self.record_weights(cohort, updates, weights)
        averaged = self.average(state, updates, weights)
        if type(self).take_step is Server.take_step:
            return averaged
        sent = {name: value for update in updates for name, value in update.params.items()}
        return self._steps(state, averaged, without_statistics(sent))

    def take_step(self, old: Tensor, mean: Tensor, memory: dict[str, Any]) -> Tensor:
        """The new values of one trained tensor, from its mean; override it for a step along mean - old.

        It is called in `aggregate` for every trained tensor that a client sent. Running means and variances
        of BatchNorm layers stay the clients' mean: a step along their difference could make a variance
        negative.

        Args:
            old: Values before the round; not to be changed in place.
            mean: Their mean over the clients, as `average` computed it; not to be changed in place.
            memory: Values for this tensor alone that are kept from round to round, by name; empty in the
                first round in which a client sends it.
        """
        return mean

    def _steps(self, state: ServerState, averaged: ServerState, names: Iterable[str]) -> ServerState:
        """The state after `take_step` for each of these tensors."""
        params = dict(averaged.params)
        kept = {key: dict(values) for key, values in state.memory.get(STEP, {}).items()}
        for name in names:
            memory = {key: values[name] for key, values in kept.items() if name in values}
            params[name] = self.take_step(state.params[name], averaged.params[name], memory)
            for key, value in memory.items():
                kept.setdefault(key, {})[name] = value
        stepped = replace(averaged, params=params)
        return stepped.remember(**{STEP: kept}) if kept else stepped

    @classmethod
    def uses_mean_only(cls) -> bool:
        """Whether a round uses nothing of the answers but their mean, as differential privacy requires.

        So it is where the class overrides none of the functions that see the answers of single clients, or
        that choose what each client receives, on which the denominator of a mean depends.
        """
        rules = (
            "round",
            "training_task",
            "send",
            "aggregate",
            "record_weights",
            "base_weights",
            "average",
            "_steps",
        )
        return all(getattr(cls, name) is getattr(Server, name) for name in rules)

    @classmethod
    def uses_sent_tensors_only(cls) -> bool:
        """Whether the new tensors depend on nothing of the answers but the tensors in them.

        So it is where `uses_mean_only` holds, or where the class itself says so with `sent_tensors_only`,
        which the contract test of private methods proves. A subclass has to say it again.
        """
        return cls.uses_mean_only() or bool(vars(cls).get("sent_tensors_only", False))

    def answers(self, clients: int) -> int:
        """Number of answers that a round has, of which clients train in it at the same time.

        Args:
            clients: Number of clients that train at the same time.
        """
        return clients

    def record_weights(self, cohort: Cohort, updates: Sequence[Update], weights: Sequence[float]) -> None:
        """Add each client's weight to the table `aggregation`."""
        for update, weight in zip(updates, weights, strict=True):
            cohort.record("aggregation", client=update.client, weight=float(weight))

    def base_weights(self, updates: Sequence[Update]) -> list[float]:
        """One weight per update according to `weighting`, summing to 1."""
        return client_weights(updates, self.weighting)

    def average(self, state: ServerState, updates: Sequence[Update], weights: Sequence[float]) -> ServerState:
        """Weighted mean of each name over the clients that sent it; other names keep their value."""
        weights = before_division(weights, updates, self.weighting)
        mean = mean_by_name(updates, weights)
        if self.lora_agg == "product_svd":
            mean |= product_mean(updates, weights, state.params)
        elif self.lora_agg in EXACT:
            mean |= exact_mean(updates, weights, state.params, self.lora_agg)
        return replace(state, params={**state.params, **mean})
