"""A run on GPUs says what a lower precision would save."""

import pytest

from rayfed.config.schema import load_config
from rayfed.engine.session import cheaper_products


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_nothing_is_said_where_tensor_cores_are_used(precision):
    assert cheaper_products(load_config(["algorithm=fedavg", f"train.precision={precision}"])) == ""


def test_the_default_names_what_is_faster():
    assert "up to 7 times as fast with train.precision=tf32, and 15 times with bf16" in cheaper_products(
        load_config(["algorithm=fedavg"])
    )
