"""The README against the code: options, architectures, metrics, files and commands."""

from __future__ import annotations

import ast
import re

import pytest

from moa_fairseq.criterions.load_heat_map_option import LoadHeatMapConfig
from moa_fairseq.criterions.with_router_loss import RouterLossConfig
from moa_fairseq.models.config import MoATransformerConfig
from moa_fairseq.models.moa_transformer import NAMED_VARIANTS

from ..paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def option_rows(heading):
    section = README.split(f"### {heading}\n")[1].split("\n### ")[0]
    section = section.split("| option | default |")[1]
    rows = re.findall(r"^\| `--([a-z-]+)` \| ([^|]+) \|", section, re.M)
    return {name.replace("-", "_"): default.strip().strip("`") for name, default in rows}


@pytest.mark.parametrize(
    "heading,configs",
    [
        ("Architectures", [MoATransformerConfig]),
        ("Criterion", [RouterLossConfig, LoadHeatMapConfig]),
    ],
)
def test_every_option_stands_in_the_readme_with_its_default(heading, configs):
    fields = configs[0].__dataclass_fields__
    rows = option_rows(heading)
    assert rows.keys() == {name for config in configs for name in config.__annotations__}
    for name, shown in rows.items():
        default = fields[name].default
        if isinstance(default, bool):
            assert shown == "off" and not default
        elif name == "moa_modules":
            assert shown == "all" and default == "encoder-self,decoder-self,cross"
        else:
            assert str(default) in (shown, f"{shown}.0")


def test_every_architecture_and_command_stands_in_the_readme():
    for name in (*NAMED_VARIANTS, *re.findall(r'"(moa-[a-z-]+) = ', SETUP)):
        assert f"`{name}`" in README, name


def test_every_file_that_the_readme_names_exists():
    for path in re.findall(r"\b(?:scripts|configs|moa_fairseq)/[\w./-]+\w", README):
        assert (ROOT / path).exists(), path


def test_python_in_the_readme_parses():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert blocks
    for block in blocks:
        ast.parse(block)
