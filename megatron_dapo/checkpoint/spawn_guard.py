"""Refuse a main script that Megatron's checkpoint writer would run a second time."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType


def require_main_guard() -> None:
    """Check that the running main script can be imported without running the job again.

    The writer of distributed checkpoints starts a helper process that imports the main script
    (multiprocessing's spawn). Without an `if __name__ == "__main__":` line that import joins
    the job a second time, under the same rank, and hangs it.

    Raises:
        RuntimeError: the main script has no such line.
    """
    main = sys.modules["__main__"]
    if not is_guarded(main):
        raise RuntimeError(
            f"{main.__file__} starts the run at its top level; saving a checkpoint starts a "
            "helper process that imports this file and would start the run again. Put the start "
            'under `if __name__ == "__main__":`'
        )


def is_guarded(main: ModuleType) -> bool:
    """True when spawn either skips the main module or finds a `__name__` test in it."""
    if not vars(main).get("__file__"):  # interactive, or python -c: not imported again
        return True
    spec = vars(main).get("__spec__")
    if spec is not None and spec.name.rpartition(".")[2] == "__main__":  # python -m package
        return True
    path = Path(str(main.__file__))
    if path.suffix != ".py" and not path.is_file():
        return True
    tests = [node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    return any(
        isinstance(node, ast.Name) and node.id == "__name__"
        for test in tests
        for node in ast.walk(test)
    )
