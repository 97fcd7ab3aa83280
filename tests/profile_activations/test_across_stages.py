"""pi-profile's file in pi-convert, and pi-run's own record of the same tokens (about 4 s)."""

import numpy as np
import pytest

from parity.gguf_file import GgufFile
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.record import save_recorded
from powerinfer_toolkit.statistics import FILE_NAME, ActivationStatistics
from powerinfer_toolkit.training.blocks import mixture_order

N_BLOCKS = 12


def convert(source, output, statistics):
    settings = ConvertSettings(str(source), output, outtype=OutType.F32, activations=statistics)
    prepare(settings).write()
    return GgufFile(output)


@pytest.fixture
def packed(profiled, sparse_checkpoint, tmp_path):
    """The statistics, and the hot-first float32 file made with them."""
    statistics = profiled("--max_tokens", 64 * N_BLOCKS)
    path = tmp_path / "hot.gguf"
    convert(sparse_checkpoint, path, tmp_path / "out")
    return statistics, path


def test_pi_convert_writes_what_was_counted(packed):
    statistics, path = packed
    file = GgufFile(path)
    assert file.key("powerinfer.neuron_order") == "hot_first"
    assert file.key("powerinfer.statistics.tokens") == statistics.n_tokens
    assert file.key("powerinfer.statistics.sha256") == statistics.counts_sha256()
    density = np.array(file.key("powerinfer.statistics.density"))
    np.testing.assert_allclose(1 - density, statistics.zero_share(), rtol=1e-6)
    assert np.isnan(statistics.union_density()[:, -1]).all()  # blocks of 64 hold no window of 64
    assert file.key("powerinfer.statistics.union_density") is None


def test_union_densities_go_into_the_file_and_its_sidecar(
    sparse_checkpoint, tmp_path, pi_profile, text_flags
):
    flags = (*text_flags, "--max_length", 128)
    assert pi_profile(sparse_checkpoint, tmp_path / "out", *flags) == 0
    union = ActivationStatistics.load(tmp_path / "out").union_density().reshape(-1)
    first = convert(sparse_checkpoint, tmp_path / "a.gguf", tmp_path / "out")
    sidecar = tmp_path / "a.activations.safetensors"
    second = convert(sparse_checkpoint, tmp_path / "b.gguf", sidecar)
    for file in (first, second):
        np.testing.assert_allclose(
            file.key("powerinfer.statistics.union_density"), union, rtol=1e-6
        )


@pytest.mark.parametrize(("batch", "mode"), [(1, "exact"), (32, "exact"), (32, "dense")])
def test_pi_run_records_what_pi_profile_counts(packed, sparse_checkpoint, tmp_path, batch, mode):
    """The same tokens through torch and through the engine, hot-first order undone by the sidecar.

    Both compute in float32 with another order of sums, so gates differ by about 1e-6 of their size of 1, and of
    12 * 63 * 480 = 363,000 gates with a density of about 1 near 0 less than one is expected within that.
    """
    statistics, path = packed
    (tokens,) = (tmp_path / "out" / "tokens").glob("*.train.npy")
    everyone = np.load(tokens)
    order = mixture_order([len(everyone)], None, N_BLOCKS, seed=0)
    blocks = everyone[order[:, 1]]
    with Model.load(path, batch=batch, ffn=mode) as model:
        recorder = model.record_activations()
        for block in blocks:
            model.score(block.tolist())
        save_recorded(recorder, model, tmp_path / "recorded.safetensors")
    recorded = ActivationStatistics.load(tmp_path / "recorded.safetensors")
    assert not recorded.in_file_order
    assert recorded.manifest.origins["weights"] == statistics.manifest.origins["weights"]
    for name, array in statistics.tally.arrays().items():
        difference = np.abs(recorded.tally.arrays()[name] - array).sum()
        assert difference <= (0 if name in ("tokens", "windows") else 8), name


def test_statistics_of_other_weights_are_refused(packed, sparse_checkpoint, tmp_path):
    from parity.checkpoints import load_checkpoint, save_checkpoint, torch

    model = load_checkpoint(sparse_checkpoint)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[0, 0] += 1
    other = save_checkpoint(model, tmp_path / "other")
    with pytest.raises(PiError, match="the activation counts belong to weights"):
        convert(other, tmp_path / "other.gguf", tmp_path / "out" / FILE_NAME)
    assert not (tmp_path / "other.gguf").exists()


def test_statistics_in_a_files_order_are_refused(packed, sparse_checkpoint, tmp_path):
    statistics, _ = packed
    ActivationStatistics(statistics.tally, statistics.manifest, in_file_order=True).save(
        tmp_path / "file_order.safetensors"
    )
    with pytest.raises(PiError, match="numbers neurons as in a hot-first model file"):
        convert(sparse_checkpoint, tmp_path / "x.gguf", tmp_path / "file_order.safetensors")
