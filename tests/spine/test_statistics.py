"""Activation statistics: every sum against plain loops, what follows from the sums, files (about 2 s)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerinfer_toolkit.artifact import Manifest, Origin
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import UNION_WINDOWS
from powerinfer_toolkit.statistics import (
    FILE_NAME,
    KIND,
    ActivationStatistics,
    Tally,
    layer_sums,
    window_counts,
)

MANIFEST = Manifest(KIND, {"weights": Origin("tiny", sha256="ab")}, {})


def draw(seed, n_sequences=3, n_positions=70, n_ff=5, counted_share=0.9):
    rng = np.random.default_rng(seed)
    fired = rng.random((n_sequences, n_positions, n_ff)) < 0.3
    return fired, rng.random((n_sequences, n_positions)) < counted_share


def tally_of(fired, counted):
    """Tally of one layer."""
    tally = Tally.zeros(1, fired.shape[-1])
    tally.add_layer(0, layer_sums(fired, counted))
    tally.add_tokens(counted)
    return tally


def statistics_of(counts, tokens, **arrays):
    tally = Tally.zeros(*np.shape(counts))
    tally.counts += np.asarray(counts)
    tally.tokens += tokens
    for name, values in arrays.items():
        getattr(tally, name)[:] = values
    return ActivationStatistics(tally, MANIFEST)


def plain_sums(fired, counted):
    """The definitions, position by position."""
    n_sequences, n_positions, n_ff = fired.shape
    counts, both, either = np.zeros(n_ff, int), 0, 0
    unions, windows = [0] * len(UNION_WINDOWS), [0] * len(UNION_WINDOWS)
    for s in range(n_sequences):
        for t in range(n_positions):
            if counted[s, t]:
                counts += fired[s, t]
            if t and counted[s, t] and counted[s, t - 1]:
                both += int((fired[s, t] & fired[s, t - 1]).sum())
                either += int((fired[s, t] | fired[s, t - 1]).sum())
        for w, size in enumerate(UNION_WINDOWS):
            for begin in range(0, n_positions - size + 1, size):
                if counted[s, begin : begin + size].all():
                    windows[w] += 1
                    unions[w] += int(fired[s, begin : begin + size].any(axis=0).sum())
    return counts, both, either, unions, windows


@given(
    st.integers(0, 1000), st.integers(1, 140), st.sampled_from([0.5, 0.97, 1.0]), st.integers(1, 3)
)
def test_sums_are_what_loops_count(seed, n_positions, counted_share, n_sequences):
    fired, counted = draw(seed, n_sequences, n_positions, counted_share=counted_share)
    counts, both, either, unions, windows = plain_sums(fired, counted)
    sums = layer_sums(fired, counted)
    assert sums.counts.tolist() == counts.tolist()
    assert (sums.both, sums.either, list(sums.unions)) == (both, either, unions)
    assert window_counts(counted) == windows


@given(st.integers(0, 1000), st.integers(1, 140))
def test_counting_everything_needs_no_mask(seed, n_positions):
    fired, _ = draw(seed, 2, n_positions)
    with_mask, without = layer_sums(fired, np.ones(fired.shape[:2], bool)), layer_sums(fired)
    assert with_mask.counts.tolist() == without.counts.tolist()
    assert (with_mask.both, with_mask.either) == (without.both, without.either)
    assert list(with_mask.unions) == list(without.unions)


def test_torch_sums_equal_numpy_sums():
    torch = pytest.importorskip("torch")
    fired, counted = draw(7, n_positions=130, counted_share=0.99)
    ours = layer_sums(fired, counted)
    theirs = layer_sums(torch.from_numpy(fired), torch.from_numpy(counted))
    assert theirs.counts.tolist() == ours.counts.tolist()
    assert [int(n) for n in theirs.unions] == list(ours.unions)
    assert (int(theirs.both), int(theirs.either)) == (ours.both, ours.either)


def test_parts_add_up_to_the_whole():
    fired, counted = draw(1, n_sequences=5)
    whole = tally_of(fired, counted)
    parts = Tally.zeros(1, fired.shape[-1])
    for chosen in (slice(3, 5), slice(0, 1), slice(1, 3)):
        parts.add(tally_of(fired[chosen], counted[chosen]))
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(parts.arrays()[name], array)


def test_union_density_is_the_mean_share_of_a_window():
    """One neuron of four fires at every second token: 1/4 of the neurons in every window of 2 or more."""
    fired = np.zeros((2, 64, 4), bool)
    fired[:, ::2, 1] = True
    statistics = ActivationStatistics(tally_of(fired, np.ones((2, 64), bool)), MANIFEST)
    np.testing.assert_array_equal(statistics.union_density(), np.full((1, 6), 0.25))
    assert statistics.zero_share() == pytest.approx(1 - 1 / 8)
    assert statistics.overlap() == 0.0


def test_union_density_without_a_whole_window_is_unknown():
    fired, counted = draw(0, n_positions=10, counted_share=1.0)
    density = ActivationStatistics(tally_of(fired, counted), MANIFEST).union_density()
    assert np.isnan(density[0]).tolist() == [False, False, False, True, True, True]


def test_dead_always_on_and_hot():
    counts = [[0, 100, 95, 94, 0, 0], [10, 10, 10, 10, 10, 10]]
    statistics = statistics_of(counts, 100)
    assert statistics.dead().tolist() == [3, 0]
    assert statistics.always_on().tolist() == [2, 0]
    # 80% of 289 is 231.2: three neurons (289) carry it, two (195) do not; of six equal ones it takes five
    assert statistics.hot_share().tolist() == [3 / 6, 5 / 6]


def test_file_round_trip(tmp_path):
    fired, counted = draw(2, n_positions=64, counted_share=1.0)
    statistics = ActivationStatistics(tally_of(fired, counted), MANIFEST, in_file_order=True)
    statistics.save(tmp_path / FILE_NAME)
    for place in (tmp_path, tmp_path / FILE_NAME):
        read = ActivationStatistics.load(place)
        assert read.in_file_order
        assert read.manifest == MANIFEST
        for name, array in statistics.tally.arrays().items():
            np.testing.assert_array_equal(read.tally.arrays()[name], array)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("content", [None, b"", b"nothing", b"\x10" * 100])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / FILE_NAME
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PiError, match=r"does not exist|holds no activation statistics") as caught:
        ActivationStatistics.load(path)
    assert "pi-profile" in caught.value.hint


def test_a_file_without_a_manifest_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file(Tally.zeros(1, 3).arrays(), tmp_path / FILE_NAME)
    with pytest.raises(PiError, match="damaged manifest"):
        ActivationStatistics.load(tmp_path)
