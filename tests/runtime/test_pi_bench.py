"""pi-bench: rows, JSON, refusals."""

from __future__ import annotations

import json
import statistics

import pytest

from powerinfer_toolkit.runtime import bench, bench_report
from powerinfer_toolkit.runtime.bench import main
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.bandwidth import Bandwidth
from powerinfer_toolkit.runtime.plan.cost import Reads, Shares, token_cost
from powerinfer_toolkit.runtime.plan.machine import probe
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, plan_cpu
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED
from refusals import assert_refused, run_command

RATE = 1e9  # bytes a second


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    """What the probe would give; the tests measure nothing."""
    found = Bandwidth({1: RATE / 2, 2: RATE}, "2026-01-31")
    monkeypatch.setattr(bench, "_bandwidth", lambda again: found)
    return found


@pytest.fixture
def relu(synthetic_gguf) -> str:
    return str(synthetic_gguf("relu"))


def run(*flags: object) -> int:
    try:
        return main([str(flag) for flag in flags])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


def test_json_has_every_test_at_every_thread_count(relu, capsys):
    assert run("-m", relu, "-p", "32,8", "-n", 4, "-t", "1,2", "-r", 3, "--json") == 0
    results = json.loads(capsys.readouterr().out)["results"]
    rows = [(row["test"], row["threads"]) for row in results]
    assert rows == [(test, t) for t in (1, 2) for test in ("pp32", "pp8", "tg4")]
    for row in results:
        assert row["tok_s"] > 0
        assert row["spread"] >= 0
        assert row["ffn_mode"] == "exact"
        # gates of random weights are open half of the time
        assert 0.3 < row["active_share"] < 0.7


def test_figures_are_median_and_range(relu, monkeypatch, capsys):
    ticks = iter([0.0, 1.0, 0.0, 2.0, 0.0, 4.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    assert run("-m", relu, "-p", 8, "-n", 0, "-t", 1, "-r", 3, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    # 8, 4 and 2 tokens a second
    assert (row["tok_s"], row["spread"]) == (4.0, 1.5)
    assert (row["tok_s_min"], row["tok_s_max"]) == (2.0, 8.0)
    assert row["tok_s_std"] == pytest.approx(statistics.stdev([8, 4, 2]))


def test_decoding_is_held_against_the_bound(relu, capsys):
    assert run("-m", relu, "-p", 4, "-n", 8, "-t", 1, "-r", 1, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["read_bytes_per_second"], record["read_threads"]) == (RATE, 2)
    prompt, decode = record["results"]
    assert prompt["bytes_per_token"] is prompt["bound_share"] is None
    assert decode["bytes_per_second"] == pytest.approx(decode["tok_s"] * decode["bytes_per_token"])
    assert decode["bound_tok_s"] == pytest.approx(RATE / decode["bytes_per_token"])
    assert decode["bound_share"] == pytest.approx(decode["tok_s"] / decode["bound_tok_s"])
    assert decode["peak_rss_bytes"] > 1 << 20


def test_prompts_alone_need_no_bandwidth(relu, monkeypatch, capsys):
    monkeypatch.delattr(bench, "_bandwidth")
    assert run("-m", relu, "-p", 4, "-n", 0, "-t", 1, "-r", 1, "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == ["results"]


def test_bytes_of_a_token(synthetic_gguf):
    """By hand: E 96, F 160, L 2, V 293, 6 and 2 heads of 16, predictors of rank 8, all F32."""
    attention = 2 * (96 * 96 + 32 * 96) + 2 * 96
    always = 4 * (96 + 96 + 293 * 96 + 2 * attention)
    ffn, predictor = 4 * 2 * 160 * 96, 4 * 2 * 8 * (96 + 160)
    need = {}
    with ModelFile(synthetic_gguf("predictors")) as file:
        for mode in ("dense", "exact", "predicted"):
            plan = plan_cpu(file.shape, PlanOptions(ffn=mode, threads=1), probe())
            shares = Shares(0.25, 0.5 if mode == "predicted" else 1.0)
            cost = token_cost(file.shape, plan, UNMEASURED, shares=shares, n_positions=10)
            need[mode] = cost.n_bytes
    base = always + 10 * 2 * 2 * 32 * 4  # and the KV cache, F32
    assert need["dense"] == pytest.approx(base + 3 * ffn)
    assert need["exact"] == pytest.approx(base + ffn + 0.5 * ffn)
    assert need["predicted"] == pytest.approx(base + 0.5 * ffn + 0.5 * ffn + predictor)


def test_a_tied_head_is_read_whole(synthetic_gguf):
    sizes = []
    for tied in (False, True):
        with ModelFile(synthetic_gguf("relu", tied=tied)) as file:
            plan = plan_cpu(file.shape, PlanOptions(), probe())
            sizes.append(Reads(file.shape, plan).head())
    assert sizes[0] - sizes[1] == 4 * 96  # the row that is looked up


def test_the_table_has_a_row_a_test(relu, capsys):
    assert run("-m", relu, "-p", 2, "-n", 3, "-t", 1, "-r", 1, "--ffn", "dense") == 0
    said = capsys.readouterr()
    head, prompt, decode = said.out.splitlines()
    assert head.split() == [*list(bench_report._COLUMNS)[:-1], "RSS", "MiB"]
    assert prompt.split()[:2] == ["pp2", "1"]
    assert prompt.split()[6:10] == ["-"] * 4
    assert decode.split()[4:6] == ["dense", "100.0%"]
    assert len(head) == len(prompt) == len(decode)
    assert "1.0 GB/s by 2 threads, measured on 2026-01-31" in said.err
    assert "say little" in said.err  # of a model that fits any cache


def test_markdown_names_the_models(relu, synthetic_gguf, capsys):
    dense = synthetic_gguf("dense")
    assert (
        run("-m", f"{relu},{dense}", *["-p", "2", "-n", "0", "-t", "1", "-r", "1", "--markdown"])
        == 0
    )
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| model | test |")
    assert set(line) == set("| -")
    assert [row.split(" | ")[0] for row in rows] == ["| relu.gguf", "| dense.gguf"]


def test_a_bound_that_was_beaten_is_explained(monkeypatch, relu, bandwidth, capsys):
    monkeypatch.setattr(bench_report, "last_level_cache_bytes", lambda: 0)
    bandwidth.rates[2] = 1.0
    assert run("-m", relu, "-p", 0, "-n", 3, "-t", 1, "-r", 1) == 0
    assert "--measure-bandwidth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ("-p 8,16", [8, 16]),
        ("-p 8 -p 16", [8, 16]),
        ("-p 8-10", [8, 9, 10]),
        ("-p 8-14+3", [8, 11, 14]),
        ("-p 8-64*2,100", [8, 16, 32, 64, 100]),
    ],
)
def test_lists_as_in_llama_bench(flags, numbers):
    assert bench.build_parser().parse_args(flags.split()).n_prompt == numbers


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-p", 0, "-n", 0], "nothing to measure"),
        (["-r", 0], "nothing to measure"),
        (["-r", "many"], "invalid int"),
        (["-p", "a"], "no list of numbers"),
        (["-p", "1,,2"], "no list of numbers"),
        (["-p", "-4"], "negative number"),
        (["-p", "4-2"], "never ends"),
        (["-p", "1-8*1"], "never ends"),
        (["-p", "0-8*2"], "never ends"),
        (["-p", "1-2+0"], "never ends"),
        (["-p", "1-5000"], "more than 1000"),
        (["--json", "--markdown"], "exclude each other"),
        (["-n", 10**9], "above the 512"),
        (["-t", "0"], "threads 0"),
        (["-t", "2,99999"], "threads 99999"),
        (["-p", 600], "above the 512"),
        (["-b", 0], "batch 0"),
        (["-ngl", 1], "-ngl is not supported"),
        (["--handover", "spin"], "--handover spin has no effect without a GPU"),
        (["--vram-budget", -8], "is out of range"),
        (["--ram-budget", "some"], "is no size"),
        (["--ffn", "predicted"], "predictors"),
        (["--no-such-flag"], "unrecognized"),
    ],
)
def test_usage_errors(relu, flags, says, capsys):
    assert_refused(run_command(main, capsys, "-m", relu, "-r", 1, *flags), 2, says)


def test_no_model(capsys):
    assert_refused(run_command(main, capsys, "-p", 8), 2, "no model given")
