"""Initial tensors in the object store: equal ones once, the same values for whoever reads them."""

import numpy as np
import pytest
import ray

from rayfed.engine.weight_store import WeightStore


@pytest.mark.slow
@pytest.mark.steady
def test_equal_tensors_are_stored_once_and_read_as_they_were(ray_cluster):
    store = WeightStore()
    frozen = np.arange(200_000, dtype=np.float32)
    first = store.put({"trunk": frozen, "head": np.zeros(3, dtype=np.float32)})
    second = store.put({"blocks.0.base": frozen.copy(), "head": np.ones(3, dtype=np.float32)})
    assert len(store) == 3
    store.put({"other shape": frozen.reshape(2, -1), "other type": frozen.view(np.int32)})
    assert len(store) == 5
    assert list(second) == ["blocks.0.base", "head"]
    assert np.array_equal(first["trunk"], second["blocks.0.base"])
    total = ray.remote(lambda weights: {name: float(array.sum()) for name, array in weights.items()})
    assert ray.get(total.remote(second)) == {"blocks.0.base": float(frozen.sum()), "head": 3.0}
