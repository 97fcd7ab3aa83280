"""pi-bench: rows, JSON, refusals."""

from __future__ import annotations

import json

import pytest

from powerinfer_toolkit.runtime import bench
from powerinfer_toolkit.runtime.bench import main
from refusals import assert_refused, run_command


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


def test_the_table_has_a_row_a_test(relu, capsys):
    assert run("-m", relu, "-p", 0, "-n", 3, "-t", 1, "-r", 1, "--ffn", "dense") == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["test", "threads", "tok/s", "spread", "ffn", "active"]
    assert row.split()[:2] == ["tg3", "1"]
    assert row.split()[-2:] == ["dense", "100.0%"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-p", 0, "-n", 0], "nothing to measure"),
        (["-r", 0], "nothing to measure"),
        (["-r", "many"], "invalid int"),
        (["-p", "a"], "no list of numbers"),
        (["-p", "1,,2"], "no list of numbers"),
        (["-p", "-4"], "negative number"),
        (["-n", 10**9], "above the 512"),
        (["-t", "0"], "threads 0"),
        (["-t", "2,99999"], "threads 99999"),
        (["-p", 600], "above the 512"),
        (["-b", 0], "batch 0"),
        (["-ngl", 1], "-ngl is not supported"),
        (["--vram-budget", 8], "without a GPU"),
        (["--ram-budget", "some"], "is no size"),
        (["--ffn", "predicted"], "predictors"),
        (["--no-such-flag"], "unrecognized"),
    ],
)
def test_usage_errors(relu, flags, says, capsys):
    assert_refused(run_command(main, capsys, "-m", relu, "-r", 1, *flags), 2, says)


def test_no_model(capsys):
    assert_refused(run_command(main, capsys, "-p", 8), 2, "no model given")
