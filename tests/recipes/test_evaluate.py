"""Model files in lm_eval against its own hf model on the same checkpoint (about 20 s, no network)."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("lm_eval")
pytest.importorskip("torch")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from parity.sparse_checkpoint import N_EMBD, N_FF, N_LAYERS, write_sparse_checkpoint
from powerinfer_toolkit.convert.cli import main as pi_convert
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.recipes.evaluate.model import PowerInferLM
from powerinfer_toolkit.runtime import Model

ROOT = Path(__file__).resolve().parents[2]
# A token's log-probability: float32 sums move logits by 1e-5 of their size (tests/parity), which is about 3 here;
# float16 keys and values by 2e-3.
PER_TOKEN = {"f32": 1e-4, "f16": 2e-2}
RANK = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sparse_checkpoint(tmp_path_factory.mktemp("checkpoint"), 16)


@pytest.fixture(scope="module")
def texts(folder):
    return [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def hf(folder):
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)


@pytest.fixture(scope="module")
def files(folder):
    """Paths of one file a type, with random predictors."""
    rng = np.random.default_rng(0)
    (folder / "predictors").mkdir()
    for layer in range(N_LAYERS):
        fc1 = rng.standard_normal((RANK, N_EMBD), dtype=np.float32)
        fc2 = rng.standard_normal((N_FF, RANK), dtype=np.float32)
        tensors = {"fc1.weight": fc1.astype(np.float16), "fc2.weight": fc2.astype(np.float16)}
        save_file(tensors, folder / "predictors" / f"model_{layer}.safetensors")
    paths = {}
    for outtype in PER_TOKEN:
        paths[outtype] = str(folder / f"{outtype}.gguf")
        flags = ["--outtype", outtype, "--predictors", str(folder / "predictors"), "-q"]
        assert pi_convert([str(folder), paths[outtype], *flags]) == 0
    return paths


def requests(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def pairs_of(texts):
    """Continuations of one and several tokens, after shared, short, empty and much too long contexts."""
    pairs = [(text[:20], text[20 : 20 + n]) for text in texts for n in (1, 2, 9)]
    pairs += [(texts[0][:20], text[:5]) for text in texts]
    return [*pairs, ("", texts[0]), ("a ", "b"), ("x" * 400 + texts[0], texts[1])]


@pytest.mark.parametrize("outtype", PER_TOKEN)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_loglikelihoods_and_greedy_flags_are_hfs(hf, files, texts, outtype, batch_size):
    """Some continuations are what hf writes greedily, so that flags of both kinds are compared."""
    starts = [(text[:30], {"until": [], "max_gen_toks": 6}) for text in texts]
    greedy = hf.generate_until(requests("generate_until", starts), disable_tqdm=True)
    pairs = pairs_of(texts) + [
        (start[0], end) for start, end in zip(starts, greedy, strict=True) if end.isascii() and end
    ]
    wanted = hf.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    ours = PowerInferLM(files[outtype], batch_size=batch_size, threads=1)
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    for (_, continuation), got, want in zip(pairs, found, wanted, strict=True):
        assert got[0] == pytest.approx(want[0], abs=PER_TOKEN[outtype] * len(continuation))
        assert got[1] == want[1] or outtype == "f16"
    assert {flag for _, flag in wanted} == {True, False}


def test_common_beginnings_are_computed_once(files, texts):
    ours = PowerInferLM(files["f32"], batch_size=4, threads=1)
    context = "".join(texts)[:200]
    pairs = [(context, text[:4]) for text in texts]
    ours.loglikelihood(requests("loglikelihood", pairs))
    assert ours._model.stats().n_tokens < 200 + 6 * len(texts)


@pytest.mark.parametrize("outtype", PER_TOKEN)
def test_rolling_loglikelihoods_are_hfs(hf, files, texts, outtype):
    arguments = [*((text,) for text in texts[:4]), ("".join(texts),)]  # the last one in windows
    wanted = hf.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))
    ours = PowerInferLM(files[outtype], batch_size=3, threads=1)
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))
    for (text,), got, want in zip(arguments, found, wanted, strict=True):
        assert got == pytest.approx(want, abs=PER_TOKEN[outtype] * len(text))


def test_greedy_texts_are_hfs(hf, files, texts):
    arguments = [(text[:30], {"until": ["=", "a"], "max_gen_toks": 24}) for text in texts]
    arguments += [
        ("x" * 400, {"until": "\n", "max_gen_toks": 30}),
        (texts[0], {"until": ["</s>"], "do_sample": False, "temperature": 0.0}),
    ]
    arguments[-1][1]["max_gen_toks"] = 12
    wanted = hf.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    ours = PowerInferLM(files["f32"], threads=1)
    assert ours.generate_until(requests("generate_until", arguments)) == wanted
    assert len({len(text) for text in wanted}) > 3  # stop texts were met


def test_a_tokenizer_that_begins_texts_with_bos(folder, texts, tmp_path):
    """As hf has it: before a context, before a text that is predicted as a whole, and not twice."""
    other = tmp_path / "bos"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("*.gguf"))
    spec = json.loads((other / "tokenizer.json").read_text())
    sequence = {"id": "A", "type_id": 0}
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": sequence}],
        "pair": [{"Sequence": sequence}, {"Sequence": sequence | {"id": "B"}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (other / "tokenizer.json").write_text(json.dumps(spec))
    assert pi_convert([str(other), str(other / "f32.gguf"), "--outtype", "f32", "-q"]) == 0
    theirs = HFLM(pretrained=str(other), device="cpu", dtype="float32", batch_size=1)
    ours = PowerInferLM(str(other / "f32.gguf"), batch_size=2, threads=1)
    for string in (texts[0], "<s>" + texts[0], ""):
        for add in (None, True, False):
            assert ours.tok_encode(string, add) == theirs.tok_encode(string, add)
    pairs = [("", texts[0]), (texts[0][:9], texts[0][9:20]), ("<s>" + texts[1], "ab")]
    wanted = theirs.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    found = ours.loglikelihood(requests("loglikelihood", pairs))
    assert np.array(found) == pytest.approx(np.array(wanted), abs=0.01)
    rolling = [(texts[2],), ("<s>" + texts[3],)]
    totals = theirs.loglikelihood_rolling(requests("loglikelihood_rolling", rolling))
    sums = ours.loglikelihood_rolling(requests("loglikelihood_rolling", rolling))
    assert sums == pytest.approx(totals, abs=0.01)
    starts = [(text[:12], {"until": ["a"], "max_gen_toks": 8}) for text in texts[:4]]
    written = theirs.generate_until(requests("generate_until", starts), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", starts)) == written


def test_predicted_mode_scores_as_pi_runs_perplexity(files, texts):
    """Every token masked as in decoding, however the texts are put together."""
    ours = PowerInferLM(files["f32"], ffn="predicted", batch_size=4, threads=1)
    arguments = [(text,) for text in texts]
    found = ours.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))
    with Model.load(files["f32"], ffn="predicted", threads=1) as model:
        ids = [[1, *model.tokenizer.encode(text)] for text in texts]
        wanted = [float(model.score(tokens).sum()) for tokens in ids]
    assert found == pytest.approx(wanted, abs=0.05)
    exact = PowerInferLM(files["f32"], ffn="exact", threads=1)
    unmasked = exact.loglikelihood_rolling(requests("loglikelihood_rolling", arguments))
    assert np.abs(np.subtract(unmasked, found)).min() > 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 0}, "batch_size 0 is out of range"),
        ({"ffn": "sparse"}, "unknown FFN mode 'sparse'"),
        ({"max_length": 4096}, "above the 256"),
    ],
)
def test_settings_that_are_refused(files, settings, said):
    with pytest.raises(UsageError, match=said):
        PowerInferLM(files["f32"], **settings)


def test_requests_that_are_refused(files):
    ours = PowerInferLM(files["f32"], threads=1, max_length=64, batch_size="auto")
    with pytest.raises(UsageError, match="num_beams is not supported"):
        ours.generate_until(requests("generate_until", [("a", {"num_beams": 4})]))
    with pytest.raises(UsageError, match="256 new tokens leave no room"):
        ours.generate_until(requests("generate_until", [("a", {})]))
    with pytest.raises(UsageError, match="a continuation of 65 tokens"):
        ours.loglikelihood(requests("loglikelihood", [("a", "b" * 65)]))
    with pytest.raises(PiError, match="no chat template"):
        ours.apply_chat_template([{"role": "user", "content": "a"}])


def test_the_entry_point_is_what_later_releases_look_for(files):
    """They register the entry point itself, which this release resolves too."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    (name, value), *rest = groups["lm_eval.models"].items()
    assert (name, rest) == ("powerinfer", [])
    point = EntryPoint(name=name, value=value, group="lm_eval.models")
    model_registry.register("powerinfer-by-entry-point", target=point)
    assert get_model("powerinfer-by-entry-point") is PowerInferLM


TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "tiny_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "tiny_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{ending}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder, texts, greedy):
    """YAML files and their documents; JSON is YAML too."""
    records = [
        {
            "text": text,
            "question": text[:30],
            "choices": [text[30:33], *(other[30:33] for other in texts[:3])],
            "answer": 0,
            "ending": end if i % 2 else "no",
        }
        for i, (text, end) in enumerate(zip(texts, greedy, strict=True))
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "documents.jsonl").write_text(lines)
    for name, task in TASKS.items():
        data = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(data | task))


def run_command(folder, model_args):
    """What the command line writes, with no network."""
    out = folder / "out"
    words = ["--model", "powerinfer", "--model_args", model_args, "--tasks", ",".join(TASKS)]
    words += ["--include_path", str(folder), "--output_path", str(out)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [sys.executable, "-m", "powerinfer_toolkit.recipes.evaluate", *words],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.rglob("results_*.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_command_gives_the_results_of_hf(hf, files, texts, tmp_path):
    starts = [(text[:30], {"until": ["\n"], "max_gen_toks": 3}) for text in texts]
    greedy = hf.generate_until(requests("generate_until", starts), disable_tqdm=True)
    write_tasks(tmp_path, texts, greedy)
    manager = TaskManager(include_path=str(tmp_path))
    wanted = simple_evaluate(hf, tasks=list(TASKS), task_manager=manager)["results"]
    report = run_command(tmp_path, f"path={files['f32']},threads=1,ffn=exact")
    found = report["results"]
    assert found["tiny_choice"]["acc,none"] == wanted["tiny_choice"]["acc,none"]
    assert found["tiny_choice"]["acc_stderr,none"] == wanted["tiny_choice"]["acc_stderr,none"]
    assert found["tiny_text"]["exact_match,none"] == 0.5
    assert wanted["tiny_text"]["exact_match,none"] == 0.5
    name = "byte_perplexity,none"
    assert found["tiny_perplexity"][name] == pytest.approx(
        wanted["tiny_perplexity"][name], rel=PER_TOKEN["f32"]
    )
    assert report["config"]["ffn_mode"] == "exact"
