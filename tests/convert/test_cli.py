"""pi-convert as a command: streams, dry run, overwriting, atomicity, torch-free (about 6 s)."""

import json
import os
import subprocess
import sys
import time

import pytest

from parity.gguf_file import GgufFile
from powerinfer_toolkit.convert import pack
from powerinfer_toolkit.convert.cli import build_parser, main

NO_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
"""
RUN = "import sys; from powerinfer_toolkit.convert.cli import main; sys.exit(main(sys.argv[1:]))"


def python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, **options
    )


def test_help_is_fast():
    best = min(timed_help() for _ in range(3))
    assert best < 0.3


def timed_help():
    begin = time.perf_counter()
    done = python(RUN, "--help")
    assert done.returncode == 0
    assert "--outtype" in done.stdout
    return time.perf_counter() - begin


def test_every_option_is_explained():
    assert all(action.help for action in build_parser()._actions)


def test_last_line_names_the_next_command(checkpoint, pi_convert, tmp_path):
    output = tmp_path / "out.gguf"
    code, out, err = pi_convert(checkpoint().path, output)
    assert code == 0
    assert out == ""
    assert err.splitlines()[-1].startswith(f"next: pi-run -m {output} -p ")
    assert pi_convert(checkpoint().path, output, "--force", "-q") == (0, "", "")


def test_dry_run_prints_the_table_and_writes_nothing(checkpoint, pi_convert, tmp_path):
    source = checkpoint({"hidden_act": "relu", "intermediate_size": 1024})
    before = sorted(tmp_path.rglob("*"))
    output = tmp_path / "out.gguf"
    code, out, err = pi_convert(source.path, output, "--dry-run", "--outtype", "q4_0")
    assert code == 0
    assert sorted(tmp_path.rglob("*")) == before
    rows = [line.split() for line in out.splitlines()]
    assert ["token_embd.weight", "300", "x", "64", "Q8_0", str(300 * 64 // 32 * 34)] in rows
    assert ["blk.1.ffn_down_t.weight", "1024", "x", "64", "Q4_0", str(1024 * 64 // 32 * 18)] in rows
    assert ["blk.1.fc2.weight", "1024", "x", "32", "F16", str(1024 * 32 * 2)] in rows
    assert ["output_norm.weight", "64", "F32", "256"] in rows
    total = sum(int(row[-1]) for row in rows)
    assert f"{len(rows)} tensors, {total / 1e6:,.1f} MB" in err
    assert pi_convert(source.path, output, "--outtype", "q4_0")[0] == 0
    stored = GgufFile(output)._reader.tensors
    assert [[t.name, t.tensor_type.name, str(t.n_bytes)] for t in stored] == [
        [row[0], row[-2], row[-1]] for row in rows
    ]


def test_outputs_are_not_overwritten_without_force(checkpoint, pi_convert, counts_file, tmp_path):
    source = checkpoint()
    output = tmp_path / "out.gguf"
    output.write_bytes(b"mine")
    code, _, err = pi_convert(source.path, output)
    assert code == 1
    assert "exists already" in err
    assert "hint: --force" in err
    assert output.read_bytes() == b"mine"
    assert pi_convert(source.path, output, "--force")[0] == 0
    assert output.read_bytes()[:4] == b"GGUF"
    output.unlink()
    (tmp_path / "out.activations.safetensors").write_bytes(b"mine")
    code, _, err = pi_convert(source.path, output, "--activations", counts_file(source))
    assert code == 1
    assert "out.activations.safetensors exists already" in err
    assert not output.exists()


def test_output_places_that_cannot_be(checkpoint, pi_convert, tmp_path):
    source = checkpoint()
    assert "is not a directory" in pi_convert(source.path, tmp_path / "nowhere" / "out.gguf")[2]
    assert "is a directory" in pi_convert(source.path, tmp_path)[2]


def test_output_has_ordinary_permissions(checkpoint, pi_convert, counts_file, tmp_path):
    source = checkpoint()
    pi_convert(source.path, tmp_path / "out.gguf", "--activations", counts_file(source))
    mask = os.umask(0)
    os.umask(mask)
    for name in ("out.gguf", "out.activations.safetensors"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_failure_while_writing_leaves_everything_as_it_was(
    checkpoint, counts_file, tmp_path, monkeypatch, capsys, failure
):
    source = checkpoint()
    counts = counts_file(source)
    output = tmp_path / "out.gguf"
    output.write_bytes(b"mine")
    before = sorted(tmp_path.rglob("*"))
    write_tensor, written = pack._write_tensor, []

    def fail_at_the_fifth(stream, tensor, allow_nonfinite):
        written.append(tensor.name)
        if len(written) == 5:
            assert list(tmp_path.glob(".out.gguf.*.tmp"))
            raise failure
        return write_tensor(stream, tensor, allow_nonfinite)

    monkeypatch.setattr(pack, "_write_tensor", fail_at_the_fifth)
    arguments = [source.path, output, "--force", "--activations", counts]
    code = main([str(argument) for argument in arguments])
    assert code == (130 if failure is KeyboardInterrupt else 1)
    assert len(written) == 5
    assert sorted(tmp_path.rglob("*")) == before
    assert output.read_bytes() == b"mine"
    assert "Traceback" not in capsys.readouterr().err


def test_base_path_needs_no_torch(checkpoint, predictor_dir, counts_file, tmp_path):
    source = checkpoint({"hidden_act": "relu"}, dtype="BF16")
    options = ["--predictors", predictor_dir(source), "--activations", counts_file(source)]
    done = python(NO_TORCH + RUN, source.path, tmp_path / "out.gguf", *options)
    assert done.returncode == 0, done.stderr
    assert "powerinfer.manifest" in (tmp_path / "out.gguf").read_bytes()[:200000].decode("latin-1")


@pytest.mark.parametrize("what", ["weights", "predictors", "activations", "--upstream-sidecar"])
def test_what_needs_torch_says_so(checkpoint, counts_file, tmp_path, what):
    source = checkpoint({"hidden_act": "relu"})
    options: list[object] = []
    folder = tmp_path / what
    if what == "weights":
        (source.path / "model.safetensors").rename(source.path / "pytorch_model.bin")
    elif what == "--upstream-sidecar":
        options = ["--activations", counts_file(source), "--upstream-sidecar"]
    else:
        folder.mkdir()
        for layer in range(2):
            (
                folder / f"{what.replace('predictors', 'model')[:10].removesuffix('s')}_{layer}.pt"
            ).touch()
        options = [f"--{what}", folder]
    done = python(NO_TORCH + RUN, source.path, tmp_path / "out.gguf", *options)
    assert done.returncode == 1
    assert "needs torch" in done.stderr, done.stderr
    assert "powerinfer-toolkit[train]" in done.stderr


def test_predictors_of_torch_equal_safetensors(checkpoint, predictor_dir, pi_convert, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    source = checkpoint({"hidden_act": "relu"})
    folder = predictor_dir(source)
    assert pi_convert(source.path, tmp_path / "a.gguf", "--predictors", folder)[0] == 0
    for path in sorted(folder.glob("*.safetensors")):
        torch.save(load_file(path), path.with_suffix(".pt"))
        path.unlink()
    assert pi_convert(source.path, tmp_path / "b.gguf", "--predictors", folder)[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_the_same_input_gives_the_same_bytes(checkpoint, pi_convert, tmp_path):
    source = checkpoint()
    for name in ("a.gguf", "b.gguf"):
        assert pi_convert(source.path, tmp_path / name)[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_source_from_the_hub_cache(checkpoint, tmp_path):
    """`id` and `id@revision` through HF_HOME with HF_HUB_OFFLINE: the snapshot is found, its commit recorded."""
    source = checkpoint()
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hf" / "hub" / "models--maker--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    source.path.rename(cached / "snapshots" / commit)
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    for model_id in ("maker/tiny", "maker/tiny@main", f"maker/tiny@{commit}"):
        output = tmp_path / "out.gguf"
        done = python(RUN, model_id, output, "--force", env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        file = GgufFile(output)
        assert file.key("powerinfer.source.name") == "maker/tiny"
        assert file.key("powerinfer.source.revision") == commit
        assert file.key("general.name") == "tiny"
        assert (
            json.loads(file.key("powerinfer.manifest"))["origins"]["weights"]["revision"] == commit
        )
    for missing in ("maker/other", "maker/tiny@v2"):
        done = python(RUN, missing, tmp_path / "x.gguf", env=environment, cwd=tmp_path)
        assert done.returncode == 1
        assert f"{missing} is no local directory and is not in the hub cache" in done.stderr
        assert "HF_HUB_OFFLINE" in done.stderr
    done = python(RUN, "./no/such/dir", tmp_path / "x.gguf", env=environment, cwd=tmp_path)
    assert "neither a directory nor a hub id" in done.stderr
    (tmp_path / "maker" / "tiny").mkdir(parents=True)  # an existing path wins
    done = python(RUN, "maker/tiny", tmp_path / "x.gguf", env=environment, cwd=tmp_path)
    assert "has no config.json" in done.stderr
