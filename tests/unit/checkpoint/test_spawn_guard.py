"""A main script that the checkpoint writer would run again is refused, not hung."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_dapo.checkpoint.spawn_guard import is_guarded, require_main_guard


def module_of(path: Path, text: str) -> ModuleType:
    path.write_text(text)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    return module


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("main()", False),
        ("if ready:\n    main()", False),
        ("def main():\n    if __name__ == '__main__': pass\nmain()", False),
        ("if __name__ == '__main__':\n    main()", True),
        ('if "__main__" == __name__ and ready:\n    main()', True),
    ],
)
def test_the_guard_is_found_at_the_top_level(tmp_path: Path, text: str, guarded: bool) -> None:
    assert is_guarded(module_of(tmp_path / "run.py", text)) == guarded


def test_modules_that_spawn_does_not_import_need_no_guard(tmp_path: Path) -> None:
    assert is_guarded(ModuleType("__main__"))  # python -c, or a prompt
    package = module_of(tmp_path / "__main__.py", "main()")
    package.__spec__ = importlib.util.spec_from_loader("package.__main__", None)
    assert is_guarded(package)


def test_a_script_without_a_guard_is_refused_by_name(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text(
        "from megatron_dapo.checkpoint.spawn_guard import require_main_guard as guard\nguard()\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1
    assert "RuntimeError" in run.stderr and "bare.py starts the run at its top level" in run.stderr


def test_the_test_runner_itself_is_guarded() -> None:
    require_main_guard()
