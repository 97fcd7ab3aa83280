"""FATReLU's threshold on its way from config.json, as pi-relufy writes it, into the file (about 1 s)."""

from __future__ import annotations

import pytest

RELU = {"hidden_act": "relu", "intermediate_size": 1024}


def test_a_threshold_is_kept(checkpoint, converted):
    made = converted(checkpoint(RELU | {"activation_threshold": 0.05}))
    assert made.key("powerinfer.activation_threshold") == pytest.approx(0.05)
    assert made.key("powerinfer.dialect") == "extended"  # upstream knows plain ReLU only


@pytest.mark.parametrize("value", [None, 0, 0.0])
def test_no_threshold_is_zero(checkpoint, converted, value):
    made = converted(checkpoint(RELU | {"activation_threshold": value}))
    assert made.key("powerinfer.activation_threshold") == 0
    assert made.key("powerinfer.dialect") == "upstream"


@pytest.mark.parametrize(
    "changes",
    [
        RELU | {"activation_threshold": -1},
        RELU | {"activation_threshold": "high"},
        {"hidden_act": "silu", "activation_threshold": 0.1},
    ],
)
def test_faulty_thresholds(checkpoint, refused, tmp_path, changes):
    source = checkpoint(changes)
    assert "activation_threshold" in refused(source.path, tmp_path / "out.gguf")
