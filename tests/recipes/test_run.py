"""The smoke recipe through every stage: skipped, redone, killed and continued (about 100 s)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

pytest.importorskip("torch")

import torch
from safetensors import safe_open

from powerinfer_toolkit.artifact import only_run
from powerinfer_toolkit.errors import ExitCode, PiError, UsageError
from powerinfer_toolkit.recipes import catalog
from powerinfer_toolkit.recipes import recipe as recipes
from powerinfer_toolkit.recipes.run import run_recipe
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.statistics import ActivationStatistics

pytestmark = pytest.mark.slow

COMMAND = (
    "import sys; from powerinfer_toolkit.recipes.cli import main; sys.exit(main(sys.argv[1:]))"
)
STAGES = ["synthetic", "relufy", "profile", "train_predictor", "convert", "verify"]


LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
MODULE = ["-m", "powerinfer_toolkit.recipes.cli"]


def start(folder, how=("-c", COMMAND)):
    """Start `pi-recipe run smoke` as a process of its own, on one thread."""
    command = [sys.executable, *how, "run", "smoke", "--output_dir", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run's directory, and what it printed."""
    folder = tmp_path_factory.mktemp("recipe") / "out"
    process = start(folder)
    out, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return folder, out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "out")


def smoke(**flags):
    """The recipe with other settings, by "section__key"."""
    found = {}
    for key, value in flags.items():
        section, _, setting = key.partition("__")
        found.setdefault(section, {})[setting] = value
    return recipes.read("smoke", found)


def contents(folder):
    """Every file that a run leaves, but for times and paths."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not name.startswith(("stages/", "tokens/", "verify/")):
            found[name] = tensors(path) if path.suffix == ".safetensors" else path.read_bytes()
    report = json.loads(found.pop("predictors/report.json"))
    del report["train_seconds"], report["settings"]
    for name in ("relufy/relufy.yaml", "model/README.md"):  # the directory, the speeds
        del found[name]
    return found | {"report": report}


def tensors(path):
    """Metadata and bytes; the file's own have the metadata in an order that differs from write to write."""
    with safe_open(path, "pt") as file:
        names = sorted(file.keys())
        arrays = [file.get_tensor(name).view(torch.uint8).numpy().tobytes() for name in names]
        return file.metadata(), dict(zip(names, arrays, strict=True))


def test_table_and_json(finished, copied, capsys):
    out = finished[1]
    table = [line.split() for line in out.splitlines()]
    assert [row[0] for row in table] == ["mode", "dense", "exact", "predicted"]
    results = run_recipe(smoke(), copied)
    assert results.to_text() + "\n" == out
    found = json.loads(json.dumps(results.to_mapping()))
    dense, exact, predicted = found["table"]
    zeros = float(ActivationStatistics.load(copied / "statistics").zero_share().mean())
    assert exact["zero_share"] == pytest.approx(zeros)
    assert exact["ffn_bytes"] == pytest.approx(1 / 3 + 2 / 3 * (1 - zeros))
    assert dense["ffn_bytes"] == 1
    trained = json.loads((copied / "predictors" / "report.json").read_text())["targets"][0]
    assert predicted["ffn_bytes"] == trained["overall"]["bytes"] < exact["ffn_bytes"]
    assert all(row["decode_tok_s"] > 0 for row in found["table"])
    for row, file in ((dense, "dense"), (exact, "model")):
        assert row["file_bytes"] == (copied / file / row["file"]).stat().st_size
    # In training's arithmetic, from relufy's own held-out blocks of the same documents.
    trained = json.loads((copied / "relufy" / "relufy_results.json").read_text())
    assert exact["perplexity"] == pytest.approx(trained["relu"]["perplexity"], rel=0.05)
    assert dense["perplexity"] == pytest.approx(trained["teacher"]["perplexity"], rel=0.05)
    assert found["model"]["passed"]
    assert found["dense"]["passed"]


def test_the_card(finished):
    folder, _ = finished
    text = (folder / "model" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    matter = yaml.safe_load(front)
    assert matter["base_model"] == "synthetic"
    assert matter["license"] == "mit"
    assert "PowerInfer" in matter["tags"]
    results = run_recipe(smoke(), folder)
    assert results.to_markdown() in body
    (command,) = [line for line in body.splitlines() if line.startswith("pi-run ")]
    (model,) = (folder / "model").glob("*.gguf")
    assert f"-m {model.name} --ffn" in command
    assert "synthetic 0, relufy 0, profile 0, train_predictor 0" in body
    assert "rank 8, calibrated to +3.0% perplexity" in body
    assert "None" not in body
    again = recipes.read(str(folder / "model" / "recipe.yaml"))
    assert again.settings == smoke().settings


def test_the_file_runs_with_the_recipes_tokenizer(finished):
    (path,) = (finished[0] / "model").glob("*.gguf")
    with Model.load(path, ffn="predicted", threads=1) as model:
        text = "".join(token.text for token in model.generate("ba du", n_predict=8))
    assert text


def test_a_finished_run_is_left_as_it_is(copied, capsys):
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*.[gs]*")}
    run_recipe(smoke(relufy__logging_steps="1"), copied)  # which changes no file
    assert {path: path.stat().st_mtime_ns for path in before} == before
    said = capsys.readouterr().err
    assert all(f"{stage} is finished already" in said for stage in STAGES)


def test_other_settings_are_refused_and_redone(copied, capsys):
    """From the stage that they belong to, and no earlier."""
    other = smoke(convert__outtype="f16")
    with pytest.raises(UsageError, match=r"convert in .* was begun with other outtype") as failure:
        run_recipe(other, copied)
    assert "--restart convert" in failure.value.hint
    weights = copied / "relufy" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    results = run_recipe(other, copied, restart="convert")
    assert weights.stat().st_mtime_ns == before
    assert [path.name for path in (copied / "model").glob("*.gguf")] == ["smoke-reglu-f16.gguf"]
    assert results.rows[1].file == "smoke-reglu-f16.gguf"
    assert "relufy is finished already" in capsys.readouterr().err


def test_two_runs_in_one_directory(tmp_path):
    with only_run(tmp_path), pytest.raises(PiError, match="another run is at work"):
        run_recipe(smoke(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_name_is_refused(copied, tmp_path):
    """Files are called as the recipe is."""
    renamed = tmp_path / "mine.yaml"
    renamed.write_bytes(catalog.find("smoke")[1].read_bytes())
    with pytest.raises(UsageError, match=r"convert in .* was begun with other name"):
        run_recipe(recipes.read(str(renamed)), copied)


def test_a_device_that_is_not_here_is_refused_before_training(tmp_path):
    with pytest.raises(UsageError, match="cannot compute on device 'meta'"):
        run_recipe(smoke(verify__device="meta"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_inputs_are_refused(copied):
    (copied / "synthetic" / "text.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(UsageError, match=r"text.jsonl was changed since synthetic") as failure:
        run_recipe(smoke(), copied)
    assert "--restart synthetic" in failure.value.hint


def test_lost_outputs_are_named(copied):
    (copied / "statistics" / "statistics.safetensors").unlink()
    with pytest.raises(UsageError, match=r"statistics.safetensors is missing since profile"):
        run_recipe(smoke(), copied)


def test_a_file_that_fails_verification_has_no_card(copied):
    strict = smoke(verify__max_kl="1e-12")
    with pytest.raises(UsageError, match=r"verify in .* other max_kl"):
        run_recipe(strict, copied)
    with pytest.raises(PiError, match="does not compute what its checkpoint does"):
        run_recipe(strict, copied, restart="verify")
    assert not (copied / "model" / "README.md").exists()
    assert not (copied / "verify" / "report.json").exists()


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no run of pi-recipe"):
        run_recipe(smoke(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_stage_that_the_recipe_lacks_is_not_restarted(tmp_path):
    recipe = recipes.read("mistral-7b/drelu")
    with pytest.raises(UsageError, match="no stage verify"):
        run_recipe(recipe, tmp_path / "out", restart="verify")


def wait_for(path, process):
    deadline = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_killed_and_continued_it_ends_with_the_same_files(finished, tmp_path):
    """Killed in training, and between two layers' predictors; Ctrl-C in verification; then left alone."""
    folder = tmp_path / "out"
    killed_at = ("relufy/checkpoints/checkpoint-15", "predictors/.resume/layers_0_0.safetensors")
    for place in killed_at:
        process = start(folder)
        wait_for(folder / place, process)
        process.kill()
        process.communicate()
    process = start(folder)
    wait_for(folder / "stages" / "verify.json", process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert said.endswith("error: interrupted\n")
    process = start(folder)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "convert is finished already" in said
    assert contents(folder) == contents(finished[0])


def test_two_processes_train_and_one_does_the_rest(tmp_path):
    process = start(tmp_path / "out", [*LAUNCH, *MODULE])
    out, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert [line.split()[0] for line in out.splitlines()] == ["mode", "dense", "exact", "predicted"]
    assert all(said.count(f"---- {stage}\n") == 1 for stage in STAGES)
    assert (tmp_path / "out" / "model" / "README.md").is_file()


@pytest.fixture
def quick():
    """Settings that make a run short, by flags."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {"relufy__max_steps": "30", "train_predictor__num_train_epochs": "1"}
    torch.set_num_threads(before)


def test_a_threshold_goes_through_to_the_file(quick, tmp_path):
    results = run_recipe(smoke(relufy__variant="fatrelu", **quick), tmp_path / "out")
    threshold = json.loads((tmp_path / "out/relufy/config.json").read_text())[
        "activation_threshold"
    ]
    (path,) = (tmp_path / "out" / "model").glob("*.gguf")
    with Model.load(path, threads=1) as model:
        assert model.metadata("powerinfer.activation_threshold") == pytest.approx(threshold)
    assert results.report["model"]["passed"]


def test_a_model_that_is_relu_already(finished, quick, tmp_path):
    """Only calibrated: the dense row is the same model with every neuron computed.

    Its neurons are in the checkpoint's order, those of the first run hot first: sums in float32 in another order, which
    moves logits of this size by 2e-5 (tests/gpu has the same limit for the same reason).
    """
    flags = quick | {"relufy__variant": "fatrelu", "relufy__max_steps": "0"}
    source = {"relufy__model_name_or_path": str(finished[0] / "relufy")}
    results = run_recipe(smoke(**flags, **source), tmp_path / "out")
    first = json.loads((finished[0] / "verify" / "report.json").read_text())
    dense = results.rows[0]
    assert dense.mode == "dense"
    assert dense.perplexity == pytest.approx(first["model"]["perplexity"]["exact"], rel=2e-5)
    assert "base_model: relufy" in (tmp_path / "out" / "model" / "README.md").read_text()


def test_a_model_that_no_file_can_hold_is_refused_before_training(finished, tmp_path):
    source = shutil.copytree(finished[0] / "synthetic", tmp_path / "gelu")
    config = json.loads((source / "config.json").read_text()) | {"hidden_act": "gelu"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PiError, match="gelu"):
        run_recipe(smoke(relufy__model_name_or_path=str(source)), tmp_path / "out")
    assert not (tmp_path / "out" / "relufy").exists()


def test_drelu_ends_with_its_predictors(quick, tmp_path):
    flags = {f"{stage}__trust_remote_code": "true" for stage in ("profile", "train_predictor")}
    recipe = smoke(relufy__variant="drelu", **flags, **quick)
    for stage in ("convert", "verify"):
        del recipe.settings[stage]
    assert run_recipe(recipe, tmp_path / "out") is None
    assert (tmp_path / "out" / "predictors" / "config.json").is_file()
