"""What users of PowerInfer ran into, tried here; each case names its issue thread or the fault behind it.

Cases that other files hold: masks and small FFNs (test_upstream_files), thread counts and all-pass predictors
(test_determinism), tied embeddings (test_shapes), types of down_t (test_tensor_types), predictors that do not
fit (runtime/test_bad_model_files), budgets (runtime/test_ram_budget), dense files of llama.cpp (test_smollm2).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.closeness import relative_l2
from parity.predictors import clear_masks
from parity.reference import Reference
from parity.steps import decode, random_tokens
from parity.synthetic import Shape, random_weights, uniform, write_gguf
from powerinfer_toolkit.runtime import Model, cli
from powerinfer_toolkit.runtime.engine import Batch
from refusals import run_command

SHAPE = Shape(n_ff=163, n_kv_heads=6, ranks=(16, 24), n_ctx=640)
PROMPT = random_tokens(SHAPE.n_vocab, 513)
# F32 and float32 sums in other orders: eps x sqrt(n) x depth, some 1e-6; masks keep clear of the threshold.
SAME = 1e-5
MARGIN = 1e-3


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """As PowerInfer writes files, but in F32."""
    folder = tmp_path_factory.mktemp("complaints")
    weights, float32 = random_weights(SHAPE, 0), uniform(Type.F32)
    everywhere = np.ones(len(PROMPT), dtype=bool)
    clear_masks(folder / "scratch", SHAPE, weights, float32, PROMPT, everywhere, margin=MARGIN)
    out = folder / "two words.powerinfer.gguf"
    return write_gguf(out, SHAPE, weights, type_of=float32, minimal=True, magic=b"PWRI")


@pytest.fixture(scope="module")
def want(path) -> np.ndarray:
    return Reference.load(path).logits(PROMPT, masked=np.ones(len(PROMPT), dtype=bool))


@pytest.mark.parametrize("n", [1, 100, 101, 512, 513])
def test_prompts_around_the_limits_of_upstreams_kernels(n, path, want):
    """#74, and the unmasked product beyond 100 tokens: one rule for every length."""
    with Model.load(path, threads=2, predict_all=True) as model:
        assert relative_l2(model.logits(PROMPT[:n]), want[:n]) <= SAME
        generation = model.generate(PROMPT[:n], n_predict=4, ignore_eos=True)
        assert len(list(generation)) == 4


def test_batch_step_and_company_agree(path, want):
    """#155: other prompts in the same steps change nothing."""
    n = 60
    texts = [PROMPT[:n], PROMPT[100 : 100 + n], PROMPT[300 : 300 + n]]
    with Model.load(path, threads=2, predict_all=True, sequences=3) as model:
        alone = [model.logits(text) for text in texts]
        assert relative_l2(alone[0], want[:n]) <= SAME
        assert relative_l2(decode(model, texts[0]), alone[0]) <= SAME
        model.engine.kv_truncate(0, 0)
        together = [[], [], []]
        for at in range(n):
            tokens = [text[at] for text in texts]
            model.engine.run(Batch(tokens, sequences=[0, 1, 2], want_logits=True))
            for rows, row in zip(together, model.engine.logits(), strict=True):
                rows.append(row)
        for rows, own in zip(together, alone, strict=True):
            assert relative_l2(np.stack(rows), own) <= SAME


def guessed_share(path: Path, **options: object) -> float:
    with Model.load(path, predict_all=True, **options) as model:
        model.logits(PROMPT[:20])
        stats = model.stats()
        return stats.neurons_guessed / stats.neurons_total


def test_who_sets_the_threshold(path, tmp_path, monkeypatch):
    """The caller before the file before 0; no variable of the environment, which nobody sees in a bug report."""
    weights = random_weights(SHAPE, 0)
    keys = {"powerinfer.sparse_threshold": 1.5}
    high = write_gguf(tmp_path / "m.gguf", SHAPE, weights, keys=keys, minimal=True, magic=b"PWRI")
    default, raised = guessed_share(path), guessed_share(high)
    assert 0.3 < default < 0.7  # logits of random weights
    assert raised < default / 2
    assert guessed_share(high, sparse_threshold=0.0) > 2 * raised
    assert guessed_share(high, sparse_threshold=float("-inf")) == 1
    assert guessed_share(high, sparse_threshold=float("inf")) == 0
    monkeypatch.setenv("LLAMA_SPARSE_PRED_THRESHOLD", "-100")
    assert (guessed_share(path), guessed_share(high)) == (default, raised)


def test_nothing_beside_the_model_matters_and_nothing_is_left_there(path, tmp_path, capsys):
    """#38, #131: stray statistics, a cached split, another budget, a path with spaces."""
    folder = tmp_path / "my models é"
    (folder / "activation").mkdir(parents=True)
    model = folder / "m.gguf"
    model.write_bytes(path.read_bytes())

    def tokens(*flags: object) -> list[int]:
        run = ["-m", model, "-p", "w1 w2", "-n", 8, "--temp", 0, "--ignore-eos", "--json"]
        return json.loads(run_command(cli.main, capsys, *run, *flags).out)["token_ids"]

    plain = tokens()
    (folder / "m.gguf.generated.gpuidx").write_bytes(b"PWRI")
    for name in ("activation_0.pt", "activation_32.pt", "notes.txt"):
        (folder / "activation" / name).write_bytes(b"junk")
    before = sorted(folder.rglob("*"))
    assert len(plain) == 8
    assert tokens("--ram-budget", 4) == tokens("--ram-budget", "200MiB") == plain
    assert tokens("--reset-gpu-index", "--disable-gpu-index", "--vram-budget", 0) == plain
    assert sorted(folder.rglob("*")) == before
