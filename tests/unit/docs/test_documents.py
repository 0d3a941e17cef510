"""The documents name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_dapo.cli.main import build_parser
from megatron_dapo.evaluation.evaluate import evaluation_metrics
from megatron_dapo.evaluation.set_report import report_set
from megatron_dapo.policy.critic import CRITIC_METRICS
from megatron_dapo.policy.policy import POLICY_METRICS
from tests.unit.evaluation.graded import graded_group
from tests.unit.rollout.simulated import CONTINUE, World, whole_run

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def glossary_names() -> set[str]:
    """Metric names of the glossary; "`a/b`, `c`" in a first column is a/b and a/c."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("| `"):
            quoted = re.findall(r"`([^`]+)`", line.split("|")[1])
            room = quoted[0].rpartition("/")[0]
            names |= {name if "/" in name else f"{room}/{name}" for name in quoted}
            names |= {f"{quoted[0]}{name}" for name in re.findall(r"`(/\w+)`", line)}
    return names


def test_every_metric_of_policy_and_critic_is_in_the_glossary() -> None:
    assert sorted({*POLICY_METRICS, *CRITIC_METRICS} - glossary_names()) == []


def test_every_metric_of_an_evaluation_is_in_the_glossary() -> None:
    report = report_set([graded_group(problem, *["Answer: 7"] * 4) for problem in range(2)])
    logged = {re.sub(r"@\d+", "@k", name) for name in evaluation_metrics({"<set>": report})}
    assert logged == {name for name in glossary_names() if name.startswith("val-")}


def test_every_metric_of_the_rollouts_is_in_the_glossary() -> None:
    logged = {name for step in whole_run(World(), CONTINUE).steps for name in step.metrics}
    assert sorted(logged - glossary_names()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text)
    named += re.findall(r"`((?:examples|docs|tests|megatron_dapo)/[\w./-]+)`", text)
    assert named or document.name == "metrics.md"
    for name in named:
        inside_package = ROOT / "megatron_dapo" / name
        found = [document.parent / name, ROOT / name, inside_package]
        assert any(path.exists() for path in found), f"{document.name} names {name}"


def test_every_command_of_the_readme_exists() -> None:
    commands = set(re.findall(r"^megatron-dapo (\w+)", (ROOT / "README.md").read_text(), re.M))
    offered = next(
        set(action.choices)
        for action in build_parser()._actions
        if action.choices is not None and not action.option_strings
    )
    assert commands
    assert commands <= offered
