"""Places that cannot be read or written, full disks, interrupts: nothing half done is left (about 15 s)."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from powerinfer_toolkit.convert import conversion
from powerinfer_toolkit.convert.gguf_file import GgufFile
from powerinfer_toolkit.errors import PiError

RUN = "import sys; from powerinfer_toolkit.convert.cli import main; sys.exit(main(sys.argv[1:]))"
RELU = {"hidden_act": "relu", "intermediate_size": 1024}
# root reads everything unless it gives up its capabilities
WITHOUT_CAPABILITIES = """
import ctypes
version, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capset(version, nothing) == 0
"""


@pytest.mark.parametrize("what", ["model.safetensors", "config.json", "model.gguf", "folder"])
def test_unreadable(checkpoint, pi_convert, child_refused, tmp_path, what):
    """Without permissions it is an error that names the path."""
    source = checkpoint()
    pi_convert(source.path, tmp_path / "model.gguf")
    target = {"model.gguf": tmp_path / what, "folder": source.path}.get(what, source.path / what)
    target.chmod(0)
    place = tmp_path / "model.gguf" if what == "model.gguf" else source.path
    if os.geteuid() != 0 and what == "folder":
        pytest.skip("the test itself could not look into it")
    err = child_refused(place, tmp_path / "out.gguf", prelude=WITHOUT_CAPABILITIES)
    target.chmod(0o755)
    assert target.name in err


def test_directories_for_files(checkpoint, refused, tmp_path):
    source = checkpoint(RELU).path
    folder = tmp_path / "folder"
    folder.mkdir()
    assert "is a directory" in refused(source, folder)
    assert "folder" in refused(
        source, tmp_path / "o.gguf", "--imatrix", folder, "--outtype", "q4_0"
    )
    assert "lacks activation_0" in refused(source, tmp_path / "o.gguf", "--activations", folder)
    assert "has no config.json" in refused(folder, tmp_path / "o.gguf")
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").mkdir()
    assert "holds no weights" in refused(source, tmp_path / "o.gguf")


@pytest.mark.parametrize("limit", [1000, 60_000])
def test_disk_full(checkpoint, child_refused, tmp_path, limit):
    """No file may grow beyond a limit, which the header reaches, or the tensors."""
    source = checkpoint(RELU | {"hidden_size": 32, "num_hidden_layers": 1})

    def shrink():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails with EFBIG instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    err = child_refused(source.path, tmp_path / "out.gguf", preexec_fn=shrink)
    assert "File too large" in err


def test_disk_full_at_the_sidecar(checkpoint, refused, counts_file, tmp_path, monkeypatch):
    """The model is whole by then, and does not appear without its sidecar."""
    source = checkpoint(RELU)
    counts = counts_file(source)

    def fail(path, *_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_sidecar", fail)
    err = refused(source.path, tmp_path / "out.gguf", "--activations", counts)
    assert "No space left" in err


def test_paths_of_any_letters(checkpoint, pi_convert, counts_file, predictor_dir, tmp_path):
    odd = tmp_path / "mod\u00e8le \U0001f999 \u6a21\u578b"
    source = checkpoint(RELU, name=odd.name)
    options = ("--predictors", predictor_dir(source), "--activations", counts_file(source))
    first, second = odd / "erst es.gguf", odd / "\u0437\u0432\u0435.gguf"
    assert pi_convert(source.path, first, *options)[0] == 0
    assert pi_convert(first, second, "--outtype", "q8_0", "--neuron-order", "original")[0] == 0
    assert GgufFile(second).value("powerinfer.source.name") == odd.name
    assert (odd / "\u0437\u0432\u0435.activations.safetensors").is_file()


@pytest.mark.parametrize("moment", ["at once", "reading", "first bytes", "halfway"])
def test_ctrl_c(slow_checkpoint, tmp_path, moment):
    """Wherever a real SIGINT comes, the process ends with 130 and nothing is left."""
    before = sorted(tmp_path.rglob("*"))
    output = tmp_path / "out.gguf"
    code = "import sys; print('ready', flush=True); " + RUN
    command = [sys.executable, "-c", code, str(slow_checkpoint), str(output), "--outtype", "q5_k"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    process.stdout.readline()
    wait_for(moment, tmp_path, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 or moment == "at once", err
    assert process.returncode != 0, "the conversion was over before the signal"
    if moment != "at once":  # before the command runs, Python itself reports the interrupt
        assert err.splitlines()[-1] == "error: interrupted"
    assert sorted(tmp_path.rglob("*")) == before


def wait_for(moment, folder, process):
    if moment == "at once":
        return
    if moment == "reading":
        time.sleep(0.7)
        return
    least = {"first bytes": 0, "halfway": 5 << 20}[moment]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        found = list(folder.glob(".out.gguf.*.tmp"))
        if found and found[0].stat().st_size > least:
            return
        time.sleep(0.005)


def test_a_model_file_that_changes_while_it_is_read(model):
    file = GgufFile(model)
    model.write_bytes(model.read_bytes()[:-4000])
    last = max(file._begins, key=lambda name: file._begins[name])
    with pytest.raises(PiError, match="cut short while"):
        file.read(last)


def test_onto_itself(model, refused, pi_convert):
    assert "exists already" in refused(model, model)
    assert pi_convert(model, model, "--force", "--outtype", "q8_0")[0] == 0
    assert GgufFile(model).entries["blk.0.ffn_up.weight"].dtype == "Q8_0"
