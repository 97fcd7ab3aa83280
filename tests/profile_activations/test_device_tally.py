"""The compiled sums of a GPU against the same sums of numpy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from powerinfer_toolkit.profile_activations.device_tally import _sums_of  # noqa: E402
from powerinfer_toolkit.statistics import layer_sums  # noqa: E402


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
@pytest.mark.parametrize("everything", [True, False])
def test_compiled_sums_equal_numpy(everything):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 130, 192, generator=draw).relu()
    kept = None if everything else torch.rand(3, 129, generator=draw) > 0.1
    with torch.inference_mode():
        on_gpu = None if kept is None else kept.cuda()
        found = torch.compile(_sums_of)(hidden.half().cuda(), on_gpu)
    fired = hidden.half()[:, 1:].numpy() != 0
    expected = layer_sums(fired, None if kept is None else kept.numpy())
    for name, sums in zip(("counts", "both", "either", "unions"), found, strict=True):
        np.testing.assert_array_equal(sums.cpu().numpy(), getattr(expected, name))
