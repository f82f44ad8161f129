"""Compressed tensors, with numbers worked out by hand."""

import pytest
import torch

from rayfed.federation.noise_and_compression import compress, expand
from rayfed.types import num_bytes
from tests.rounding import near

CHANGE = torch.tensor([[0.1, -4.0, 0.0], [2.54, 0.3, -0.02]])


@pytest.mark.parametrize(
    ("codes", "expected", "size"),
    [
        (("fp16",), CHANGE.half().float(), 6 * 2),
        # the step is 4 / 127 = 0.0315: 0.1 is 3 steps, 2.54 is 81, 0.3 is 10 and -0.02 is -1
        (("int8",), torch.tensor([[3.0, -127, 0], [81, 10, -1]]) * (4 / 127), 6 + 4),
        (("top_k",), torch.tensor([[0.0, -4, 0], [2.54, 0, 0]]), 2 * (4 + 4)),
        (("top_k", "int8"), torch.tensor([[0.0, -127, 0], [81, 0, 0]]) * (4 / 127), 2 * (1 + 4) + 4),
        (("fp16", "int8", "top_k"), torch.tensor([[0.0, -127, 0], [81, 0, 0]]) * (4 / 127), 2 * (1 + 4) + 4),
    ],
)
def test_what_arrives_and_how_many_bytes_it_took(codes, expected, size):
    coded = compress(CHANGE, codes, top_k=0.3)  # of 6 entries, ceil(1.8) = 2
    near(expand(coded, CHANGE.shape), expected, 2)  # the step, and its multiple
    assert num_bytes(coded) == size


def test_top_k_of_all_entries_changes_nothing_and_one_entry_is_always_sent():
    assert torch.equal(expand(compress(CHANGE, ("top_k",), top_k=1.0), CHANGE.shape), CHANGE)
    assert num_bytes(compress(CHANGE, ("top_k",), top_k=1e-9)) == 8  # one entry at least


@pytest.mark.parametrize("codes", [("int8",), ("top_k",), ("fp16", "int8")])
def test_no_change_stays_no_change(codes):
    zero = torch.zeros(3)
    assert torch.equal(expand(compress(zero, codes, top_k=0.1), zero.shape), zero)
