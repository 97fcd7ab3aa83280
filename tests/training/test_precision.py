"""Products of float32 matrices: the setting holds within, and is as it was afterwards."""

from __future__ import annotations

import pytest
import torch

from powerinfer_toolkit.training.precision import float32_products

matmul = torch.backends.cuda.matmul


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.parametrize("mode", ["tf32", "ieee"])
def test_in_a_process_that_set_precision_the_new_way(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' Trainer does on a GPU; torch refuses to answer under the old name then."""
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    before = matmul.fp32_precision
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    with float32_products(mode):
        assert matmul.fp32_precision == mode
    assert matmul.fp32_precision == before
