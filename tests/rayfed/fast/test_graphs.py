"""Graphs of a network: the bits of passes without them, and when a pass must not use one."""

import copy
import inspect
import logging
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

from rayfed.devices import CountedDraws, counting
from rayfed.executors.worker import adjust_trunk
from rayfed.fast import graphs
from rayfed.fast.fast_passes import FastPasses
from rayfed.fast.graphs import CudaRecorder, graphs_in, graphs_of, why_no_graphs
from rayfed.federation.params import digest
from rayfed.federation.train_config import TrainConfig
from rayfed.models.backbone import compute_part
from rayfed.models.lora_layer import twice_differentiable
from rayfed.testing import small_setup
from tests.conftest import STEADY
from tests.pretended import TYPE, pretended
from tests.pretended_autocast import mixed_precision
from tests.pretended_graphs import recording
from tests.rayfed.fast.test_group import Answers, played, prepared

LORA = ("algorithm=fedavg", "data.domains=[plain]", "model.options={depth: 2}", "tuning.dropout=0.5")
WORLD = small_setup(*LORA).context


class Played:
    """A tuned model on the pretended device, whose passes and gradients are remembered."""

    def __init__(self, device, with_graphs, context=WORLD):
        self.model = context.build().to(device.name)
        self.device = device.name
        adjust_trunk(self.model, TrainConfig(), TYPE)
        FastPasses().prepare(self.model, TrainConfig(graphs=with_graphs), TYPE)
        self.model.train()
        self.draws = [CountedDraws(3)]
        self.seen = []
        self._rng = torch.Generator().manual_seed(0)

    def rows(self, number=2):
        return torch.randn(number, 3, 32, 32, generator=self._rng).to(self.device)

    def forward(self, rows=2):
        with counting(self.draws):
            output = self.model(self.rows(rows))
        self.seen.append(output.detach().inner.clone())
        return output

    def keep_gradients(self):
        self.seen += [p.grad.inner.clone() for p in self.model.parameters() if p.grad is not None]

    def backward(self, output, **options):
        output.square().sum().backward(**options)
        self.keep_gradients()

    @torch.no_grad()
    def learn(self):
        for p in self.model.parameters():
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
                p.grad = None

    def steps(self, number, rows=2):
        for _ in range(number):
            self.backward(self.forward(rows))
            self.learn()


def compare(play, context=WORLD, fails=None):
    """Play the same with and without graphs; returns the graphs and the recorder."""
    with pretended() as device, recording(fails) as recorders:
        plain, own = Played(device, False, context), Played(device, True, context)
        for each in (plain, own):
            play(each)
    assert len(plain.seen) == len(own.seen) > 1
    assert all(map(torch.equal, plain.seen, own.seen))
    assert [each.state for each in plain.draws] == [each.state for each in own.draws]
    return graphs_in(own.model), recorders[0]


def test_training_and_evaluation_in_several_shapes_have_the_bits_of_passes_without_graphs():
    def play(it):
        it.steps(3)
        it.steps(2, rows=3)
        it.steps(1)
        it.model.eval()
        with torch.no_grad():
            it.forward()
            it.forward()

    found, recorder = compare(play)
    assert found.made == 3  # two shapes of training, one of evaluation
    assert found.used == 5
    assert recorder.records == 5
    assert recorder.replays == 2 * 4 + 1


@pytest.mark.parametrize("tuning", ["tuning=bitfit", "tuning=visual_prompt", "tuning.residual=true"])
def test_tunings_of_other_kinds_have_the_same_bits(tuning):
    found, _ = compare(lambda it: it.steps(3), small_setup(*LORA[:3], tuning).context)
    assert found.used == 2


def test_blocks_that_are_left_out_have_graphs_of_their_own():
    def play(it):
        for blocks in ((0,), (1,), (0,)):
            it.model.active = blocks
            it.steps(2)

    assert compare(play)[0].made == 2


def test_clients_of_one_pass_that_drew_unequally_often_draw_what_they_would():
    def play(it):
        it.draws = [CountedDraws(5), CountedDraws(6)]
        it.steps(2, 4)
        with counting(it.draws[:1]):
            it.model(it.rows())
        it.steps(2, 4)
        assert it.draws[0].state != it.draws[1].state

    assert compare(play)[0].used == 3


def test_gradients_of_passes_are_added_up():
    def play(it):
        for _ in range(4):
            it.backward(it.forward())

    assert compare(play)[0].used == 3


def test_outputs_and_gradients_of_earlier_passes_stay():
    def play(it):
        live = [p for name, p in it.model.named_parameters() if p.requires_grad and "net." in name]
        kept = []
        for _ in range(4):
            with counting(it.draws):
                features = it.model(it.rows(), headless=True)
            kept += [features.detach(), *torch.autograd.grad(features.square().sum(), live)]
        it.seen += [each.inner for each in kept]

    assert compare(play)[0].used == 3


def test_a_pass_uses_no_graph_while_another_one_can_go_backward():
    def play(it):
        it.steps(2)
        first, second = it.forward(), it.forward()
        with torch.no_grad():
            it.forward()
        it.backward(second)
        it.backward(first)
        it.steps(1)

    assert compare(play)[0].used == 3


def test_a_pass_that_nobody_holds_keeps_no_graph():
    def play(it):
        for _ in range(4):
            it.forward()

    assert compare(play)[0].used == 3


def test_a_pass_that_goes_backward_twice_stays_open_until_the_second_time():
    def play(it):
        it.steps(2)
        output = it.forward()
        it.backward(output, retain_graph=True)
        it.forward()
        it.backward(output)
        with pytest.raises(RuntimeError, match="a second time"):
            it.backward(output)
        it.steps(1)

    assert compare(play)[0].used == 3


def test_a_second_backward_pass_after_the_graph_was_freed_is_an_error():
    with pretended() as device, recording():
        it = Played(device, True)
        it.steps(2)
        with counting(it.draws):
            total = it.model(it.rows(), headless=True).sum()  # whose gradients need no tensors of their own
        total.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            total.backward()
    assert graphs_in(it.model).used == 2


def test_layers_that_are_evaluated_among_those_that_train_have_graphs_of_their_own():
    def play(it):
        layers = [
            module for module in it.model.modules() if isinstance(module, nn.Dropout) and module.training
        ]
        it.steps(2)
        layers[0].eval()
        it.steps(2)

    assert compare(play)[0].made == 2


def test_a_refreshed_network_is_recorded_anew_and_a_changed_one_is_not():
    def weight(it):
        return it.model.stack[0].mlp.fc1.base_layer.weight

    @torch.no_grad()
    def play(it):
        with torch.enable_grad():
            it.steps(3)
        weight(it).mul_(1.5)
        with torch.enable_grad():
            it.steps(1)
        it.model.stack[0].mlp.fc1.base_layer.weight = nn.Parameter(weight(it) * 0.5, requires_grad=False)
        with torch.enable_grad():
            it.steps(3)

    found, recorder = compare(play, small_setup(*LORA, "tuning.sites=[mlp.fc1]").context)
    assert found.made == 2
    assert found.used == 3 + 2
    assert recorder.records == 4


@pytest.mark.parametrize("number", [1, 2])
def test_a_pass_that_cannot_be_recorded_is_computed_and_said_once(number, caplog):
    fault = RuntimeError("operation not permitted when stream is capturing\nmore lines")
    with caplog.at_level(logging.WARNING):
        found, recorder = compare(lambda it: it.steps(4), fails={number: fault})
    assert found.used == recorder.replays == 0
    assert [record.message for record in caplog.records if "train.graphs" in record.message] == [
        "train.graphs: passes with inputs of shape (2, 3, 32, 32) are computed without a graph: "
        "RuntimeError: operation not permitted when stream is capturing"
    ]


def test_a_network_that_waits_for_the_device_is_computed_without_a_graph():
    def play(it):
        block = it.model.stack[0]
        forward = block.forward
        block.forward = lambda x: forward(x) if float(x.detach().sum()) else x
        it.steps(3)

    found, _ = compare(play)
    assert found.made == 0


def test_a_network_that_draws_from_the_stream_of_the_device_is_computed_without_a_graph():
    def play(it):
        torch.manual_seed(0)
        for module in it.model.modules():
            if isinstance(module, nn.Dropout):
                module.__class__ = nn.Dropout
        it.steps(3)

    found, recorder = compare(play)
    assert found.made == recorder.records == 0


def test_no_more_kinds_of_passes_are_recorded_than_the_limit(monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 1)
    found, _ = compare(lambda it: [it.steps(2, rows) for rows in (2, 3, 2)])
    assert found.made == 1
    assert found.used == 3


def test_too_little_memory_is_an_error():
    full = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        compare(lambda it: it.steps(3), fails={2: full})


@pytest.mark.parametrize(
    "context",
    [
        lambda it: twice_differentiable(),
        lambda it: it.model.stack.record_tokens({0}),
        lambda it: it.model.stack.use_change(lambda block, run, j, x, *ends: run(x)),
        lambda it: it.model.stack.use_prompt(it.rows(1).flatten()[: it.model.width][None]),
    ],
)
def test_passes_that_are_read_or_changed_use_no_graph(context):
    def play(it):
        it.steps(2)
        with context(it):
            it.steps(1)

    assert compare(play)[0].used == 1


def test_a_pass_within_a_transformation_of_functions_uses_no_graph():
    def play(it):
        it.steps(2)
        with patch.object(torch._C, "_are_functorch_transforms_active", lambda: True):
            output = it.forward()
        it.backward(output)

    assert compare(play, small_setup(*LORA[:3], "tuning=bitfit").context)[0].used == 1


def test_a_tensor_that_begins_to_train_ends_the_use_of_graphs():
    def play(it):
        it.steps(2)
        it.model.net.norm.weight.requires_grad_()
        it.steps(2)

    assert compare(play)[0].used == 1


def test_a_copy_of_a_model_has_no_graphs():
    with pretended() as device, recording():
        model = Played(device, True).model
        assert graphs_in(copy.copy(model)) is graphs_in(model) is not None
        assert copy.deepcopy(model.compute) is compute_part


def test_models_that_have_no_graphs_say_why():
    model = WORLD.skeleton()
    assert why_no_graphs(model) == ""
    model.requires_grad_(True)
    assert "most of the network is trained" in why_no_graphs(model)
    model.net.bn = nn.BatchNorm2d(3)
    model.refresh()
    assert "BatchNorm" in why_no_graphs(model)
    with patch.object(type(model), "is_own", True):
        assert "of your own" in why_no_graphs(model)


def test_other_devices_have_no_graphs():
    assert graphs_of(WORLD.skeleton()) is None


CASES = [
    (1, "train.batch_size=4"),
    (4, "train.batch_size=4"),
    (4, "train.batch_size=4 train.precision=bf16 data.partition.scheme=dirichlet data.limit=40"),
    (3, "train.micro_batch=2 train.batch_size=4 train.optimizer=adam"),
    (4, "algorithm=ditto train.batch_size=4"),
    (4, "capacity=dynamic train.batch_size=4"),
    (4, "model=clip_mini model.options={} train.batch_size=4"),
]


@pytest.mark.parametrize(("group", "overrides"), [pytest.param(*case, marks=STEADY) for case in CASES])
def test_runs_of_one_client_and_of_groups_have_the_same_tensors(group, overrides):
    common = ("algorithm=fedavg", "tuning=lora", "tuning.dropout=0.5", "data.limit=24", "train.epochs=2")
    own = overrides.split()
    digests = []
    mixed = mixed_precision() if "bf16" in overrides else nullcontext()
    with pretended() as device, recording() as recorders, mixed:
        for more in (("train.graphs=false",), ("train.graphs=auto",)):
            setup = prepared(*common, *own, *more)
            executor = Answers(setup, device=device.name)
            digests.append(digest(played(setup, group, executor=executor)[1]))
    assert digests[0] == digests[1]
    (recorder,) = recorders
    has_graphs = "capacity" not in overrides  # rows are collected anew for clients that hold different blocks
    assert (recorder.replays > 1) is has_graphs


def test_graphs_of_cuda_are_recorded_with_arguments_that_torch_takes():
    seen = []
    wanted = inspect.signature(torch.cuda.graph)

    @contextmanager
    def graph(*args):
        seen.append(wanted.bind(*args).arguments)
        yield
        seen.append("ended")

    made, stream = SimpleNamespace(replay=lambda: seen.append("replayed")), SimpleNamespace(device=None)
    with ExitStack() as stack:
        for name, value in (
            ("device", lambda device: nullcontext()),
            ("Stream", lambda device: stream),
            ("graph_pool_handle", lambda: (0, 1)),
            ("CUDAGraph", lambda: made),
            ("graph", graph),
        ):
            stack.enter_context(patch.object(torch.cuda, name, value))
        recorder = CudaRecorder(torch.device("cuda", 0))
        replay, result = recorder.record(lambda: seen.append("worked") or 7)
    replay()
    arguments, *rest = seen
    assert rest == ["worked", "ended", "replayed"]
    assert result == 7
    assert arguments == {
        "cuda_graph": made,
        "pool": (0, 1),
        "stream": stream,
        "capture_error_mode": "thread_local",
    }
    assert recorder.address(torch.zeros(2)) > 0
