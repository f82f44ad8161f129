import numpy as np

from rayfed.data.text import PAD, Inputs, Targets, padded_length
from rayfed.objective import IGNORED

INPUTS = Inputs(np.arange(10, 31, dtype=np.int32), np.array([0, 3, 12, 21]), 12)


def test_a_batch_is_padded_to_a_multiple_of_8_of_its_own_longest_text():
    assert INPUTS[[0]].tolist() == [[10, 11, 12, *[PAD] * 5]]
    both = INPUTS[np.array([1, 0])]
    assert both.shape == (2, 12)  # 9 tokens would be 16, but the model takes 12
    assert both[0].tolist() == [*range(13, 22), *[PAD] * 3]
    assert both[1].tolist() == [10, 11, 12, *[PAD] * 9]
    assert padded_length(9, 100) == 16
    assert len(INPUTS) == 3
    assert INPUTS[:1].shape == (1, 8)


def test_targets_are_the_next_tokens_that_are_learned():
    learned = np.zeros(21, np.uint8)
    learned[[1, 2, 11]] = 1  # the last token of text 1, and two of text 0
    targets = Targets(INPUTS, learned)
    batch = targets[np.array([0, 1])]
    assert batch.shape == INPUTS[np.array([0, 1])].shape
    assert batch[0].tolist() == [11, 12, *[IGNORED] * 10]
    assert batch[1].tolist() == [*[IGNORED] * 7, 21, *[IGNORED] * 4]
    assert targets.counts.tolist() == [2, 1, 0]


def test_the_first_token_of_a_text_is_never_a_target():
    learned = np.ones(21, np.uint8)
    targets = Targets(INPUTS, learned)
    assert targets.counts.tolist() == [2, 8, 8]
    assert [int((targets[[i]] != IGNORED).sum()) for i in range(3)] == [2, 8, 8]
