"""The handed cases: small inputs with their right answers, by kind and operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CASES = json.loads(Path(__file__).with_name("handed_cases.json").read_text())["cases"]
Case = dict[str, Any]


def handed_cases(kind: str, op: str | None = None) -> list[Any]:
    """Cases of `kind` (a letter) and `op`, as pytest parameters whose names are the case ids."""
    found = [c for c in CASES if c["kind"] == kind and op in (None, c["op"])]
    assert found, f"no handed case of kind {kind!r} and op {op!r}"
    return [pytest.param(case, id=case["id"]) for case in found]
