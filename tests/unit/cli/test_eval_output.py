"""Names of sets come from files: whatever they are, they are shown as they are."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatron_dapo.cli.eval_output import progress, result_table
from megatron_dapo.evaluation.set_report import report_set
from tests.unit.evaluation.graded import graded_group


@pytest.mark.parametrize("name", ["aime", "[red]", "[/]", "[/bold] aime"])
def test_a_name_is_no_markup(name: str) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(result_table({name: report_set([graded_group(1, "Answer: 7")])}))
    assert isinstance(console.file, io.StringIO)
    assert name in console.file.getvalue()
    with progress({name: 1}) as advance:
        advance(name)
