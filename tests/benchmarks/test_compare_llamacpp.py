"""The comparison with llama.cpp: order of the runs, ratios, table; the engines are stand-ins."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "compare_llamacpp.py"
SPEEDS = {  # (engine, threads) -> decode speed of each round
    ("ours", 1): [20.0, 30.0, 10.0],
    ("ours", 2): [40.0, 40.0, 40.0],
    ("xllamacpp", 1): [10.0, 10.0, 20.0],
    ("xllamacpp", 2): [8.0, 8.0, 8.0],
}


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare_llamacpp", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def measured(compare):
    """(arguments, order of the runs, what measure_all gave) of two engines."""
    args = compare.build_parser().parse_args(["m.gguf", "-r", "3", "-p", "0", "-n", "8"])
    order, left = [], {key: list(speeds) for key, speeds in SPEEDS.items()}

    def engine(name):
        def measure(threads):
            order.append((threads, name))
            return {
                "isa": f"CPU : AVX2 = 1 | AVX512 = 0 | {name.upper()} = 1 | ",
                "decode": left[name, threads].pop(0),
            }

        return compare.Engine(name, measure)

    return args, order, compare.measure_all(args, [engine("ours"), engine("xllamacpp")])


def test_engines_alternate_and_take_turns(measured):
    _, order, _ = measured
    ours, peer = "ours", "xllamacpp"
    assert [name for threads, name in order if threads == 1] == [ours, peer, peer, ours, ours, peer]
    assert [threads for threads, _ in order] == [1] * 6 + [2] * 6


def test_ratios_are_of_the_same_round(compare, measured):
    args, _, found = measured
    rows = {(row["threads"], row["engine"]): row for row in compare.summarise(found, args.peers)}
    one = rows[1, "ours"]
    assert (one["tok_s"], one["spread"]) == (20.0, 1.0)
    assert one["ratio_xllamacpp"] == [2.0, 0.5, 3.0]  # 2, 3 and 0.5
    # each at its own best: ours with two threads, the peer with one
    assert rows["best", "ours"]["tok_s"] == 40.0
    assert rows["best", "xllamacpp"]["tok_s"] == 10.0
    assert rows["best", "ours"]["ratio_xllamacpp"] == [4.0, 2.0, 4.0]


def test_table_and_instruction_sets(compare, measured, capsys):
    args, _, found = measured
    compare.print_markdown(args, compare.summarise(found, args.peers))
    head, line, *rows = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == rows[0].count("|")
    assert rows[0] == "| decode 8 | 1 | ours | 20.0 | 100% | 2.00 (0.50-3.00) |"
    assert rows[1].endswith("| - |")
    assert compare.instruction_sets(found)["ours"] == "AVX2 OURS"
    assert compare._short("avx512") == "avx512"


def test_prompts_have_no_special_token_and_no_common_beginning(compare):
    first, second = (compare.prompt_tokens(512, run, 32000) for run in range(2))
    assert min(first) >= 300
    assert max(first + second) < 32000
    assert first[0] != second[0]


def test_a_sparse_file_adds_our_modes(compare):
    args = compare.build_parser().parse_args(
        ["d.gguf", "--sparse", "s.gguf", "--peers", "node-llama-cpp", "xllamacpp"]
    )
    names = [engine.name for engine in compare.engines(args)]
    assert names == ["ours", "ours exact", "ours predicted", "node-llama-cpp", "xllamacpp"]
