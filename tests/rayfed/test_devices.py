from contextlib import nullcontext

import pytest
import torch

from rayfed.devices import (
    ALIGNMENT,
    HOST,
    as_made_here,
    chosen_device,
    clone_all,
    free_memory,
    move,
    numbers,
    peak_memory,
    reset_peak,
    same_draws,
    set_deterministic,
    set_products,
    total,
    total_memory,
)
from rayfed.errors import ConfigError
from tests.pretended import TYPE, pretended

DETERMINISTIC = torch.utils.deterministic

NESTED = {
    "a": torch.arange(6.0).view(2, 3),
    "b": [torch.ones(2, 2).t(), 3, "text"],
    "c": (torch.tensor([1, 2]), {0: torch.tensor(7.0)}),
}


def test_tensors_from_elsewhere_are_laid_out_as_new_ones():
    """Views, and what begins between two multiples of 64 bytes, are copied; values and types stay."""
    flat = torch.rand(130)
    known = torch.rand(3, 4)
    value = {
        "known": known,
        "turned": known.T,
        "inside": [flat[10:].view(4, 30), flat[1:2].view(())],
        "once": (flat[10:].expand(2, 120), torch.rand(8, 1).as_strided((8, 1), (1, 5))),
        "whole": torch.arange(9)[1:].as_strided((2, 2), (4, 2)),
        "half": torch.rand(4, 6).bfloat16()[:, 2:],
        "parameter": torch.nn.Parameter(torch.rand(5)[1:]),
        "empty": torch.zeros(3, 0).T,
        "text": "text",
    }
    found = as_made_here(value)
    assert found["known"] is known
    assert found["empty"] is value["empty"]
    assert found["text"] == "text"
    assert isinstance(found["once"], tuple)
    pairs = [(found[key], value[key]) for key in ("turned", "whole", "half", "parameter")]
    pairs += [pair for key in ("inside", "once") for pair in zip(found[key], value[key], strict=True)]
    for ours, theirs in pairs:
        assert ours is not theirs
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert ours.stride() == torch.empty(theirs.shape).stride()
        assert ours.data_ptr() % ALIGNMENT == 0
        assert not ours.requires_grad
    assert as_made_here(found) is found


def test_a_tensor_that_is_laid_out_anew_stays_one_tensor():
    part = torch.rand(20)[1:]
    first, second = as_made_here([{"a": part}, (part, 1)])
    assert first["a"] is second[0] is not part


def test_a_nested_value_goes_there_and_back_in_one_copy_for_each_type():
    with pretended() as device:
        there = move(NESTED, torch.device(device.name))
        assert (device.counts.down, device.counts.waits) == (2, 0)  # float32 and int64, from pinned memory
        assert {str(there["a"].device), str(there["b"][0].device), str(there["c"][0].device)} == {device.name}
        assert there["c"][1][0].device == HOST  # a number
        back = move(there, HOST)
        assert device.counts.up == 2
    assert back["b"][1:] == [3, "text"]
    assert isinstance(back["c"], tuple)
    for ours, theirs in (
        (back["a"], NESTED["a"]),
        (back["b"][0], NESTED["b"][0]),
        (back["c"][0], NESTED["c"][0]),
    ):
        assert torch.equal(ours, theirs)


def test_a_number_of_a_device_comes_back_with_the_rest():
    with pretended() as device:
        there = torch.ones(3).to(device.name)
        device.counts.clear()
        back = move({"x": there, "n": there.sum(), "again": there}, HOST)
        assert (device.counts.up, device.counts.waits) == (1, 1)
    assert back["n"].item() == 3
    assert back["n"].shape == ()
    assert back["again"] is back["x"]


def test_on_the_cpu_nothing_is_copied():
    assert move(NESTED, HOST) is NESTED


def test_copies_on_a_device_are_made_together():
    with pretended() as device:
        there = {name: torch.full((2, 3), value).to(device.name) for name, value in enumerate((1.0, 2.0, 3))}
        there["few"] = there[0][:1, 1:].requires_grad_()
        device.counts.clear()
        found = clone_all(there)
        assert device.counts.kernels == 2  # float32 and int64
        assert list(found) == list(there)
        assert all(found[name].tolist() == value.tolist() for name, value in there.items())
        assert not found["few"].requires_grad
        found[0].zero_()
        assert there[0].sum().item() == 6


def test_copies_on_the_cpu_are_tensors_of_their_own():
    given = {"a": torch.ones(2), "b": torch.ones(3)}
    found = clone_all(given)
    assert [value.untyped_storage().nbytes() for value in found.values()] == [8, 12]
    assert found["a"] is not given["a"]


def test_gradients_do_not_travel():
    with pretended() as device:
        there = move({"x": torch.ones(3, requires_grad=True)}, torch.device(device.name))
        assert not there["x"].requires_grad


def test_numbers_are_read_with_one_wait():
    with pretended() as device:
        x = torch.tensor([0.1, 0.2]).to(device.name)
        device.counts.clear()
        found = numbers([x[0], 2, x[1].requires_grad_(), 0.5])
        assert device.counts.waits == 1
    assert found == [torch.tensor(0.1).item(), 2.0, torch.tensor(0.2).item(), 0.5]
    large = torch.tensor(2**24 + 1)
    assert numbers([large, torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)]) == [
        2**24 + 1,
        torch.tensor(0.1).item(),
        0.1,
    ]
    assert numbers([]) == []


def test_a_total_is_added_from_the_first_to_the_last():
    assert total([1e16, 1.0, -1e16]) == 0.0  # `sum` gives 1 since Python 3.12


@pytest.mark.parametrize("kind", ["cpu", TYPE])
def test_the_same_numbers_are_drawn_again(kind):
    torch.manual_seed(0)
    with same_draws(torch.device(kind, 0)):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)


def test_products_of_the_cpu_are_exact_and_a_device_without_bf16_is_refused():
    before = torch.get_float32_matmul_precision()
    set_products(HOST, "tf32")
    assert torch.get_float32_matmul_precision() == before
    set_products(HOST, "bf16")
    with pytest.raises(ConfigError, match=rf"train.precision: 'bf16' needs .* device '{TYPE}'; set fp32"):
        set_products(torch.device(TYPE, 0), "bf16")


def test_tf32_is_for_runs_that_ask_for_it():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        for precision, wanted in (("tf32", ("high", True)), ("fp32", ("highest", False))):
            set_products(torch.device(TYPE, 0), precision)
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == wanted
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_sums_of_bf16_products_stay_in_float32(monkeypatch):
    products = torch.backends.cuda.matmul
    monkeypatch.setattr(products, "allow_bf16_reduced_precision_reduction", True)
    set_products(HOST, "fp32")
    assert products.allow_bf16_reduced_precision_reduction
    set_products(torch.device(TYPE, 0), "fp32")
    assert not products.allow_bf16_reduced_precision_reduction


@pytest.fixture
def settings_of_bits():
    """Give back what torch and the environment had before, whatever the test chooses."""
    before = torch.are_deterministic_algorithms_enabled()
    attention, filled = torch.backends.cuda.cudnn_sdp_enabled(), DETERMINISTIC.fill_uninitialized_memory
    yield
    torch.set_deterministic_debug_mode("error" if before else "default")
    torch.backends.cuda.enable_cudnn_sdp(attention)
    DETERMINISTIC.fill_uninitialized_memory = filled


@pytest.mark.parametrize("kind", ["cpu", TYPE])
def test_deterministic_kernels_are_asked_for_and_given_up(kind, settings_of_bits):
    device = torch.device(kind)
    for wanted, on in ((True, True), (False, False), ("auto", kind == TYPE), (False, False)):
        set_deterministic(device, wanted)
        assert torch.are_deterministic_algorithms_enabled() == on


def test_new_memory_is_not_filled_for_the_sake_of_bits(settings_of_bits):
    DETERMINISTIC.fill_uninitialized_memory = True
    set_deterministic(torch.device(TYPE, 0), "auto")
    assert not DETERMINISTIC.fill_uninitialized_memory


@pytest.mark.parametrize("wanted", ["auto", False])
def test_a_device_does_without_the_attention_of_cudnn(wanted, settings_of_bits):
    torch.backends.cuda.enable_cudnn_sdp(True)
    set_deterministic(HOST, wanted)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    set_deterministic(torch.device(TYPE, 0), wanted)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_free_memory_is_unknown_where_torch_does_not_say():
    assert free_memory(HOST) is None


@pytest.mark.parametrize("query", [reset_peak, peak_memory, free_memory, total_memory])
def test_a_question_about_memory_starts_cuda(query):
    """The functions of torch itself: without a GPU they say that it is missing, whatever is asked first."""
    missing = pytest.raises((RuntimeError, AssertionError), match=r"no NVIDIA driver|not compiled with CUDA")
    with nullcontext() if torch.cuda.is_available() else missing:
        query(torch.device("cuda", 0))


def test_a_pretended_device_has_no_statistics_before_it_has_started():
    with pretended() as device:
        with pytest.raises(RuntimeError, match="Invalid device argument"):
            getattr(torch, TYPE).reset_peak_memory_stats(device.name)
        reset_peak(torch.device(device.name))
        assert device.counts.resets == 1


def test_a_device_is_chosen_by_name(monkeypatch):
    assert chosen_device("cpu") == HOST
    with pytest.raises(ConfigError, match=r"cluster.device: 'gpu' is not 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        chosen_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("auto") == torch.device("cuda", 0)
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match=r"cluster.device: 'cuda:2' does not exist: torch sees 2"):
        chosen_device("cuda:2")


def test_a_gpu_that_cannot_be_used_is_refused_with_the_reason_of_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen_device("auto") == HOST
    with pytest.raises(ConfigError, match=r"'cuda' cannot be used: .*; write cluster.device=cpu") as caught:
        chosen_device("cuda")
    if torch.cuda.device_count() == 0:
        assert any(words in str(caught.value) for words in ("no NVIDIA driver", "not compiled with CUDA"))
