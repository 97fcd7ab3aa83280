"""Every shipped configuration is one that pi-relufy and accelerate accept."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from powerinfer_toolkit.convert.relufy import cli

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MODELS = sorted(RECIPES.glob("*-*/*.yaml"))
LAUNCHES = sorted((RECIPES / "accelerate_configs").glob("*.yaml"))


@pytest.mark.parametrize("path", MODELS, ids=lambda path: "/".join(path.parts[-2:]))
def test_relufy_reads_it(path):
    settings = cli.read_settings(cli.build_parser().parse_args([str(path)]))
    assert settings.sparsity_target
    dense = cli.read_settings(cli.build_parser().parse_args([str(path), "--variant", "dense"]))
    assert dense.dataset_mixture == settings.dataset_mixture


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.stem)
def test_accelerate_reads_it(path):
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    found = config_args.load_config_from_file(str(path))
    assert found.mixed_precision == "no"
    written = yaml.safe_load(path.read_text())
    assert found.num_processes == written["num_processes"]


def test_the_launches_are_complete():
    names = {path.stem for path in LAUNCHES}
    assert names == {"cpu", "single_gpu", "ddp", "fsdp", "multi_node"}
