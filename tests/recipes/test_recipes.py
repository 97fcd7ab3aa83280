"""Recipes as files and as commands, without running a stage (2 s)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from powerinfer_toolkit import settings as schema
from powerinfer_toolkit.artifact import Manifest
from powerinfer_toolkit.errors import ExitCode, PiError, UsageError
from powerinfer_toolkit.recipes import catalog, checks, cli
from powerinfer_toolkit.recipes import recipe as recipes
from powerinfer_toolkit.recipes.progress import Progress

NAMES = sorted(catalog.shipped())
WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "accelerate", "datasets")))  # importing None fails
import socket
def refuse(*_args, **_kwargs): raise OSError("no network")
socket.socket.connect = refuse
from powerinfer_toolkit.recipes.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def run(capsys):
    """run(*words) -> (exit code, stdout, stderr)."""

    def command(*words):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as end:  # argparse's
            code = end.code
        return code, *capsys.readouterr()

    return command


def edited(tmp_path, name="smoke", **changes):
    """A copy of a recipe with other values, by "section__key"; a section that is None is left out."""
    content = yaml.safe_load(catalog.find(name)[1].read_text())
    for key, value in changes.items():
        section, _, setting = key.partition("__")
        if setting:
            content[section][setting] = value
        elif value is None:
            del content[section]
        else:
            content[section] = value
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_shipped_recipes():
    assert {
        "llama-2-7b/reglu",
        "mistral-7b/drelu",
        "mistral-7b/reglu",
        "smoke/reglu",
        "smollm2-135m/fatrelu",
        "smollm2-135m/reglu",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_validates(name, run):
    code, out, _ = run("validate", name)
    assert code == 0
    assert out.startswith(f"{name}: ")
    recipe = recipes.read(name)
    assert recipe.description
    assert recipe.license


@pytest.mark.parametrize("name", NAMES)
def test_what_show_prints_is_the_same_recipe(name, run, tmp_path):
    code, out, _ = run("show", name)
    assert code == 0
    path = tmp_path / "shown.yaml"
    path.write_text(out)
    shown, recipe = recipes.read(str(path)), recipes.read(name)
    assert shown == recipe
    for stage, found in recipes.schemas().items():
        if stage in recipe.settings:
            assert list(yaml.safe_load(out)[stage]) == schema.keys(found)  # defaults too, flat


def test_ls_names_model_and_variant(run):
    code, out, _ = run("ls")
    rows = [line.split(maxsplit=3) for line in out.splitlines()]
    assert code == 0
    assert [row[0] for row in rows] == NAMES
    assert rows[0][1:3] == ["meta-llama/Llama-2-7b-hf", "reglu"]
    assert all(len(row) == 4 for row in rows)


def test_validation_needs_neither_torch_nor_network():
    command = [sys.executable, "-c", WITHOUT_TORCH]
    for words in (["validate", "llama-2-7b"], ["show", "smoke"], ["ls"]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_cp_copies_and_refuses_to_overwrite(run, tmp_path):
    target = tmp_path / "mine.yaml"
    assert run("cp", "smoke", target)[0] == 0
    assert target.read_bytes() == catalog.find("smoke")[1].read_bytes()
    assert run("validate", target)[0] == 0
    target.write_text("mine")
    code, _, said = run("cp", "smoke", target)
    assert code == ExitCode.FAILURE
    assert "exists already" in said
    assert target.read_text() == "mine"


def test_flags_go_before_the_file(run):
    words = ["show", "smoke", "--relufy.max_steps", "7", "--train_predictor.predictor_rank=[8, 16]"]
    code, out, _ = run(*words, "--relufy.torch_compile")
    assert code == 0
    found = yaml.safe_load(out)
    assert found["relufy"]["max_steps"] == 7
    assert found["relufy"]["torch_compile"] is True
    assert found["train_predictor"]["predictor_rank"] == [8, 16]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smok"], "did you mean smoke?"),
        (["smollm2-135m/relu"], "did you mean smollm2-135m/reglu?"),
        (["smollm2-135m"], "name one: smollm2-135m/fatrelu, smollm2-135m/reglu"),
        (["smoke", "--relufy.max_stesp", "3"], "did you mean --relufy.max_steps?"),
        (["smoke", "--relufy.max_steps", "many"], "max_steps is 'many', not integer"),
        (["mistral-7b/drelu", "--convert.outtype", "f16"], "has no section convert"),
        (["smoke", "--convert.outtype", "q9"], "flags: convert: outtype is 'q9'"),
        (["smoke", "--profile.max_length", "0"], "profile: max_length is 0"),
        (["smoke", "--verify.max_kl", "nan"], "flags: verify: max_kl is 'nan', not number"),
        (["smoke", "--relufy.dataset_mixture", "[a"], "--relufy.dataset_mixture: '[a' is not YAML"),
        (["smoke", "--synthetic.documents", "0"], "synthetic: documents is 0"),
        (["smoke", "--verify.seed", "-1"], "verify: seed is -1"),
        (["smoke", "--train_predictor.seed", "4294967296"], "train_predictor: seed is 4294967296"),
        (["smoke", "--synthetic.hidden_size", "63"], "synthetic: hidden_size is 63"),
        (["smoke", "--convert.outlier_ratio", "-1"], "convert: outlier_ratio is -1.0"),
    ],
)
def test_wrong_command_lines(words, said, run):
    code, _, stderr = run("validate", *words)
    assert code == ExitCode.USAGE
    assert said in stderr


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"relufy__max_stesp": 3}, "relufy: unknown key max_stesp", "did you mean max_steps?"),
        ({"convert__out_type": "f16"}, "unknown key out_type", "did you mean outtype?"),
        ({"profiel": {}}, "unknown key profiel", "did you mean profile?"),
        ({"profile": [1]}, "profile is [1], not a mapping", ""),
        ({"license": 3}, "license is 3, not text", ""),
    ],
)
def test_wrong_files(changes, said, hint, tmp_path):
    with pytest.raises(UsageError) as failure:
        recipes.read(str(edited(tmp_path, **changes)))
    assert said in failure.value.message
    assert hint in failure.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"relufy": None}, "has no section relufy"),
        ({"profile": None}, "train_predictor needs the section profile"),
        ({"convert": None}, "verify needs the section convert"),
        ({"relufy__variant": "dense"}, "no neuron of it is ever off"),
        ({"relufy__variant": "drelu"}, "profile.trust_remote_code is false"),
        ({"relufy__model_name_or_path": ""}, "model_name_or_path is missing"),
        ({"relufy__sparsity_target": 2}, "sparsity_target is 2.0"),
        ({"train_predictor__held_out_share": 0.2}, "train_predictor.held_out_share is 0.2"),
        ({"verify__held_out_share": 0.2}, "verify.held_out_share is 0.2"),
        ({"profile__separator_token": "<s>"}, "profile.separator_token is <s>"),
        ({"relufy__eval_mixture": [{"path": "x"}]}, "relufy.eval_mixture is ['x']"),
        ({"verify__predictors": "x"}, "verify.predictors are those of the run"),
        ({"convert__dialect": "upstream"}, "computes q8_0 wrongly"),
        (
            {"convert__dialect": "upstream", "relufy__variant": "fatrelu"},
            "knows no threshold of fatrelu",
        ),
    ],
)
def test_contradictions(changes, said, tmp_path):
    recipe = recipes.read(str(edited(tmp_path, **changes)))
    with pytest.raises(UsageError) as failure:
        checks.check(recipe)
    assert said in failure.value.message


def test_drelu_has_no_file_format(tmp_path):
    changes = {f"{stage}__trust_remote_code": True for stage in ("profile", "train_predictor")}
    path = edited(tmp_path, relufy__variant="drelu", **changes)
    with pytest.raises(UsageError, match="no file format for dReLU"):
        checks.check(recipes.read(str(path)))


def test_missing_texts_and_models_are_named(run, tmp_path, monkeypatch):
    """Before they exist, validation warns; a run does not begin without them."""
    monkeypatch.chdir(tmp_path)
    recipe = ["smollm2-135m/reglu", "--relufy.model_name_or_path", "./dense"]
    code, _, said = run("validate", *recipe)
    assert code == 0
    for path in ("./dense", "corpus/held_out.jsonl.xz", "corpus/train/*.jsonl.xz"):
        assert f"warning: there is nothing at {path} yet" in said
    pytest.importorskip("torch")
    code, _, said = run("run", *recipe, "--output_dir", "out")
    assert code == ExitCode.FAILURE
    assert "there is nothing at ./dense, corpus/held_out.jsonl.xz" in said
    assert not (tmp_path / "out").exists()


def test_a_run_says_where_its_checkpoint_lies(run, tmp_path):
    words = ["run", "smoke", "--output_dir", tmp_path / "out", "--relufy.output_dir", "elsewhere"]
    code, _, said = run(*words)
    assert code == ExitCode.USAGE
    assert "--relufy.output_dir is for pi-relufy" in said


@pytest.mark.parametrize("text", ["{", "[]", '{"manifest": 3, "outputs": 4}', None])
def test_a_damaged_record_names_the_way_out(text, tmp_path):
    made = Manifest("recipe_stage", {}, {})
    progress = Progress(tmp_path)
    progress.open()
    progress.begin("profile", made)
    path = tmp_path / "stages" / "profile.json"
    path.write_text(text or json.dumps(json.loads(path.read_text()) | {"outputs": [1]}))
    with pytest.raises(PiError, match="damaged"):
        progress.begin("profile", made)


def test_names_of_the_command_are_those_of_the_stages():
    assert list(recipes.schemas()) == list(cli.STAGE_NAMES)
