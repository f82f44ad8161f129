"""Messages across processes, and errors: what goes in comes out."""

import pickle
from dataclasses import replace

import pytest
import torch

from rayfed.engine.loop import run_rounds
from rayfed.errors import ClientError, ConfigError, DataError, RayFedError, ResourceError, unknown
from rayfed.executors.actor_pool import Outbox, SentTensors
from rayfed.executors.client_actor import Received
from rayfed.executors.inline import InlineExecutor
from rayfed.executors.wire import decode, decode_updates, encode, encode_updates, pack, unpack
from rayfed.federation.executor import Call
from rayfed.testing import small_setup
from rayfed.types import Broadcast, Update


def test_packing_keeps_names_types_shapes_and_bits():
    params = {
        "a": torch.randn(3, 4),
        "empty": torch.zeros(0, 5),
        "half": torch.randn(2, dtype=torch.float16),
        "brain": torch.randn(2, 3).bfloat16(),
        "scalar": torch.tensor(3.5),
        "count": torch.tensor([1, 2, 3]),
        "b": torch.randn(7).t(),
    }
    back = unpack(pickle.loads(pickle.dumps(pack(params))))
    assert list(back) == list(params)
    for name, value in params.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)
    assert len(pack(params).flat) == 4  # one array per type, not one per tensor


def test_every_tensor_of_a_message_begins_where_a_new_one_would():
    """Also in rows of several clients; its place is not known to whoever receives it."""
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex128)
    shapes = ((10,), (), (3, 1, 7), (0, 2), (64,), (5, 5))
    names = [(f"{kind} {shape}", kind, shape) for kind in kinds for shape in shapes]
    each = [{name: torch.rand(shape).to(kind) for name, kind, shape in names} for _ in range(3)]
    updates = [Update(client=f"c{i}", params=params) for i, params in enumerate(each)]
    received = [unpack(pack(each[0])), *(update.params for update in decode_updates(encode_updates(updates)))]
    for params, sent in zip(received, [each[0], *each], strict=True):
        first: dict[torch.dtype, int] = {}
        for name, kind, shape in names:
            value = params[name]
            assert torch.equal(value, sent[name])
            assert value.stride() == torch.empty(shape).stride()
            if value.numel():
                start = first.setdefault(kind, value.data_ptr())
                assert (value.data_ptr() - start) % 64 == 0


class Counted:
    """A task that counts how often it is pickled."""

    pickled = 0

    def __call__(self, client, sent):
        return sent

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, ()


def test_a_task_is_pickled_once_for_all_calls_of_an_exchange(monkeypatch):
    monkeypatch.setattr("rayfed.executors.actor_pool.ray.put", lambda value: value)
    task, args = Counted(), []
    calls = [Call(f"c{i}", task, "fit", Broadcast(round=0, params={})) for i in range(5)]
    outbox = Outbox(SentTensors())
    wire = [outbox.message(call, None, lambda ref: args.append(ref) or len(args) - 1) for call in calls]
    received = Received(args)
    back = [received.call(each) for each in pickle.loads(pickle.dumps(wire))]
    assert [call.client for call in back] == [call.client for call in calls]
    assert len({id(call.task) for call in back}) == 1
    assert isinstance(back[0].task, Counted)
    assert Counted.pickled == 1


def test_what_is_one_tensor_in_several_messages_is_one_where_they_arrive(monkeypatch):
    monkeypatch.setattr("rayfed.executors.actor_pool.ray.put", lambda value: value)
    task, args = Counted(), []
    body, small, large = torch.rand(3), torch.rand(4), torch.rand(200, 200)
    heads = [torch.ones(2), torch.ones(2)]
    messages = [
        Broadcast(round=0, params={"body": body, "head": head}, shared={"a": [small], "b": {"c": large}})
        for head in heads
    ]
    outbox = Outbox(SentTensors())
    calls = [Call(f"c{i}", task, "fit", sent) for i, sent in enumerate(messages)]
    wire = [outbox.message(call, None, lambda ref: args.append(ref) or len(args) - 1) for call in calls]
    wire, args = pickle.loads(pickle.dumps((wire, args)))
    received = Received(args)
    first, second = (received.call(each).sent for each in wire)
    assert first.params["body"] is second.params["body"]
    assert first.params["head"] is not second.params["head"]
    assert first.shared["a"][0] is second.shared["a"][0]
    assert first.shared["b"]["c"] is second.shared["b"]["c"]
    assert torch.equal(second.params["body"], body)
    assert torch.equal(second.shared["b"]["c"], large)
    another = decode(encode({"a": small, "b": small}))
    assert another["a"] is not another["b"]  # the store of a client: each call has its own


class Objects:
    """Stands for Ray's object store, and keeps what was put into it."""

    def __init__(self, monkeypatch):
        self.values = []
        monkeypatch.setattr("rayfed.executors.actor_pool.ray.put", self.put)
        monkeypatch.setattr("rayfed.executors.actor_pool.ray.get", lambda number: self.values[number])

    def put(self, value):
        self.values.append(value)
        return len(self.values) - 1


def test_tensors_that_the_last_exchange_sent_are_not_sent_again_unless_they_changed(monkeypatch):
    objects, sent = Objects(monkeypatch), SentTensors()
    body, head = torch.rand(3), torch.rand(2)

    def exchange(params):
        """References of an exchange that sends these, as two messages."""
        outbox = Outbox(sent)
        places = []
        for k in range(2):
            call = Call(f"c{k}", Counted(), "fit", Broadcast(round=0, params=dict(params)))
            outbox.message(call, None, lambda ref: places.append(ref) or len(places) - 1)
        return places

    first, again = exchange({"body": body, "head": head}), exchange({"body": body, "head": head})
    assert len({*first, *again}) == len(objects.values) == 1
    exchange({"head": head})
    assert len(objects.values) == 2
    exchange({"body": body, "head": head})  # of the exchange before the last one nothing is kept
    assert len(objects.values) == 3
    for change in (lambda: body.add_(1), lambda: body.data.mul_(2), lambda: body.numpy().__setitem__(0, 7.0)):
        before = len(objects.values)
        change()
        exchange({"body": body, "head": head})
        assert len(objects.values) == before + 1
        assert torch.equal(unpack(objects.values[-1])["body"], body)
    before = len(objects.values)
    exchange({"body": body.clone(), "head": head})  # other tensors, which a group may compute otherwise
    exchange({"head": head, "body": body})
    assert len(objects.values) == before + 2


def test_what_is_no_number_and_made_without_gradients_is_compared_by_its_bytes(monkeypatch):
    objects, sent = Objects(monkeypatch), SentTensors()
    with torch.inference_mode():
        values = {
            "nan": torch.full((3,), float("nan")),
            "half": torch.rand(4).bfloat16(),
            "zero": torch.zeros(2),
        }
        assert sent.reference(values) == 0
        sent.begin()
        assert sent.reference(values) == 0
        values["zero"][0] = -0.0
        sent.begin()
        assert sent.reference(values) == 1
    assert len(objects.values) == 2


@pytest.mark.parametrize("method", ["fedavg", "fedadam", "fedgcr", "fedra"])
def test_scores_and_the_next_training_share_what_is_sent(method, monkeypatch):
    """Three rounds send the tensors before the first one and after each: four times, not six."""
    objects, sent = Objects(monkeypatch), SentTensors()
    setup = small_setup(f"algorithm={method}", "rounds=3", "evaluation.every=1")

    class Sending(InlineExecutor):
        def map(self, calls):
            outbox = Outbox(sent)
            for call in calls:
                if call.tag in ("fit", "report"):
                    outbox.message(replace(call, task=Counted()), None, lambda ref: 0)
            return super().map(calls)

    whole = list(run_rounds(setup.experiment, Sending(setup.context, setup.weights), setup.start))
    sizes = {name for packed in objects.values for name, _, _ in packed.layout}
    full = [packed for packed in objects.values if len(packed.layout) == len(sizes)]
    assert len(whole) == 3
    assert len(full) == 4


def test_packing_copies():
    value = torch.zeros(3)
    packed = pack({"a": value})
    value += 1
    assert unpack(packed)["a"].tolist() == [0, 0, 0]


def test_containers_of_tensors_pass_through():
    thing = {"a": [torch.ones(2), 3, "text"], "b": (torch.zeros(1), {"c": torch.tensor(2.0)}), "n": None}
    back = decode(pickle.loads(pickle.dumps(encode(thing))))
    assert torch.equal(back["a"][0], torch.ones(2))
    assert back["a"][1:] == [3, "text"]
    assert isinstance(back["b"], tuple)
    assert float(back["b"][1]["c"]) == 2
    assert back["n"] is None


def test_a_copied_store_can_be_written():
    packed = encode({"w": torch.zeros(2)})
    decode(packed, copy=True)["w"].add_(1)
    assert decode(packed)["w"].tolist() == [0, 0]


def test_updates():
    update = Update(
        client="c",
        params={"a": torch.ones(2)},
        num_examples=3,
        metrics={"m": 1.0},
        extra={"h": torch.ones(1)},
    )
    (back,) = decode_updates(pickle.loads(pickle.dumps(encode_updates([update]))))
    assert (back.client, back.num_examples, back.metrics) == ("c", 3, {"m": 1.0})
    assert torch.equal(back.params["a"], torch.ones(2))
    assert torch.equal(back.extra["h"], torch.ones(1))


def test_updates_of_clients_that_hold_the_same_share_arrays():
    def params(**more):
        half, brain = torch.randn(2, dtype=torch.float16), torch.randn(2, 3).bfloat16()
        return {"a": torch.randn(3, 4).t(), "half": half, "brain": brain, "scalar": torch.randn(()), **more}

    each = [
        params(),
        params(more=torch.ones(1)),
        {},
        params(a=torch.randn(4, 2)),
        params(empty=torch.zeros(0, 2)),
        params(),
        params(empty=torch.zeros(0, 2)),
        {},
    ]
    updates = [Update(client=f"c{i}", params=given, num_examples=i) for i, given in enumerate(each)]
    sent = pickle.loads(pickle.dumps(encode_updates(updates)))
    arrays = [id(packed) for _, packed, _ in sent]
    assert arrays[0] == arrays[5]
    assert arrays[4] == arrays[6]
    assert arrays[2] == arrays[7]
    assert len(set(arrays)) == 5
    back = decode_updates(sent)
    assert [update.client for update in back] == [update.client for update in updates]
    for update, given in zip(back, each, strict=True):
        assert list(update.params) == list(given)
        for name, value in given.items():
            assert update.params[name].dtype == value.dtype
            assert torch.equal(update.params[name], value)
            assert update.params[name].is_contiguous()


def children(cls):
    return [cls, *(c for sub in cls.__subclasses__() for c in children(sub))]


@pytest.mark.parametrize("cls", children(RayFedError))
def test_errors_survive_pickling(cls):
    error = (
        cls("c1", 2, "fit", "boom", "trace")
        if issubclass(cls, ClientError)
        else cls("what, where, what to do")
    )
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_bad_input_is_one_family():
    assert issubclass(DataError, ConfigError)
    assert issubclass(ResourceError, ConfigError)
    assert not issubclass(ClientError, ConfigError)


def test_unknown_names_have_a_nearest_match():
    assert unknown("model", "xyz", ["vit"]) == "model: 'xyz' does not exist. Choose one of: vit"
