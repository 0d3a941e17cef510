"""The house: floors, doors, sizes, and words that do not belong into the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_dapo.config.evaluation import EvaluationSet
from megatron_dapo.config.keys import NAME, documented_keys, is_section
from megatron_dapo.config.schema import RunConfig
from tests.conftest import REPOSITORY

PACKAGE = REPOSITORY / "megatron_dapo"
FLOORS = [
    {"cli", "train", "replay"},
    {"session"},
    {"trainer"},
    {"engine_weights"},
    {"rollout", "policy", "resharding", "checkpoint", "evaluation", "planning"},
    {"data", "reward", "batch", "loss"},
    {"parallel"},
    {"observability"},
    {"types", "config", "device"},
]
FLOOR_OF = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
VLLM_SIDE = ("plugin", "layers", "parts", "files", "worker", "source", "bridge", "client")
"""Modules of the resharding room that run inside vLLM, or are handed to it."""
DOORS = {
    "vllm": {"rollout", *(f"resharding/vllm_{name}.py" for name in VLLM_SIDE)},
    "transformer_engine": {"policy/fp8.py", "policy/model.py"},
    "apex": {"policy/optimizer.py"},
    "sentencepiece": {"data/tokenizer.py"},
    "wandb": {"observability/wandb_process.py"},
    "megatron": {"policy", "resharding", "parallel", "checkpoint", "device"},
}
MOST_MODULE_LINES = 400
MOST_FUNCTION_LINES = 60
BROAD_EXCEPTS = 1
"""Around untrusted answer text, in the reward room."""
GRAB_BAGS = {"utils.py", "common.py", "helpers.py", "misc.py"}
TEXT_SUFFIXES = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".json", ".cfg", ""}
FORBIDDEN_WORDS = {
    "a path of one machine": r"/[w]ork/|/tmp/[d]ev|/opt/[p]ypi|/[r]oot/",
    "a package index": r"pypi\.[o]rg|python[h]osted|deb\.[d]ebian|--(index-[u]rl|find-[l]inks)",
    "a reference to a ticket": r"\bissue #?\d",
    "unfinished work": r"\bTODO\b|\bFIXME\b|NotImplementedError",
}
SAY_NOT_READ = {f"config/{name}.py" for name in ("schema", "algorithm", "checks", "remarks")}
"""Modules that declare keys or talk about them."""


@dataclass(frozen=True)
class Module:
    """One file of the package, parsed."""

    path: str
    room: str
    text: str
    tree: ast.Module


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        path = file.relative_to(PACKAGE).as_posix()
        room = path.split("/")[0].removesuffix(".py")
        text = file.read_text()
        found.append(Module(path, room, text, ast.parse(text)))
    return tuple(found)


def imported(tree: ast.AST) -> Iterator[list[str]]:
    """Every imported module as its dotted parts; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ([*(node.module or "").split("."), alias.name] for alias in node.names)


def test_imports_go_down() -> None:
    for module in modules():
        if module.room == "__init__":
            continue
        for name in imported(module.tree):
            if name[0] != "megatron_dapo" or len(name) < 2 or name[1] == module.room:
                continue
            assert name[1] in FLOOR_OF, f"{module.path} imports the unknown room {name[1]}"
            assert FLOOR_OF[module.room] < FLOOR_OF[name[1]], (
                f"{module.path}: {module.room} may not import {name[1]}, which is no floor below"
            )


def test_outside_packages_come_in_through_their_door() -> None:
    for module in modules():
        for name in imported(module.tree):
            door = DOORS.get(name[0])
            assert door is None or module.room in door or module.path in door, (
                f"{module.path}: {name[0]} may be imported only in {sorted(door or ())}"
            )


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Signature and body; the documentation does not count."""
    assert function.end_lineno is not None
    length = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        assert text.end_lineno is not None
        length -= text.end_lineno - text.lineno + 1
    return length


def test_modules_and_functions_stay_small() -> None:
    for module in modules():
        lines = module.text.count("\n")
        assert lines < MOST_MODULE_LINES, f"{module.path} has {lines} lines"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = lines_of_code(node)
                assert length < MOST_FUNCTION_LINES, f"{module.path}: {node.name} has {length}"


def test_no_module_is_a_grab_bag() -> None:
    for module in modules():
        assert Path(module.path).name not in GRAB_BAGS, module.path


def test_nothing_prints_and_nothing_is_imported_by_star() -> None:
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{module.path}:{node.lineno} prints"
                guard = node.func.id == "getattr" and len(node.args) == 3
                assert not guard, f"{module.path}:{node.lineno} guards with getattr"
            if isinstance(node, ast.ImportFrom):
                star = any(alias.name == "*" for alias in node.names)
                assert not star, f"{module.path}:{node.lineno} imports *"


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    return caught is None or bool(names & {"Exception", "BaseException"})


def test_errors_are_caught_by_name() -> None:
    broad = [
        f"{module.path}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and is_broad(node)
    ]
    assert len(broad) <= BROAD_EXCEPTS, broad
    assert all(place.startswith("reward/") for place in broad), broad


def test_every_public_function_and_class_is_documented() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for module in modules():
        assert ast.get_docstring(module.tree) or not module.text, f"{module.path}: what is it?"
        for node in module.tree.body:
            if isinstance(node, kinds) and not node.name.startswith("_") and node.name != "main":
                assert ast.get_docstring(node), f"{module.path}: {node.name} has no docstring"


def repository_texts() -> list[Path]:
    command = ["git", "-C", str(REPOSITORY), "ls-files"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [REPOSITORY / name for name in listed.stdout.splitlines()]
    return [f for f in files if f.suffix in TEXT_SUFFIXES and f.is_file()]


@pytest.mark.parametrize("what", FORBIDDEN_WORDS)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN_WORDS[what])
    found = [
        f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()[:80]}"
        for file in repository_texts()
        if file != Path(__file__).resolve() and "\0" not in (text := file.read_text())
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == [], f"{what}: {found}"


def section_class(section: str) -> str:
    if section == f"evaluation.sets.{NAME}":
        return EvaluationSet.__name__
    return RunConfig.model_fields[section].annotation.__name__  # type: ignore[union-attr]


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, or the name itself."""
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of every assignment; `a, b = c, d` makes two."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def names_of_section(tree: ast.Module, section: str, kind: str) -> set[str]:
    """What a module calls a section: by its key, by annotation, or by assignment from it."""
    names = {section}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation and kind in ast.unparse(node.annotation):
            names.add(node.arg)
        if isinstance(node, ast.AnnAssign) and kind in ast.unparse(node.annotation):
            names.add(last_name(node.target))
    return names | {last_name(to) for to, value in assignments(tree) if last_name(value) in names}


def is_read(key: str) -> bool:
    """Some module outside the schema reads the key from its section."""
    section, _, name = key.rpartition(".")
    kind = section_class(section) if section else "RunConfig"
    for module in modules():
        reads = [
            last_name(node.value)
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and node.attr == name
        ]
        known = names_of_section(module.tree, section or "config", kind) if reads else set()
        if module.path not in SAY_NOT_READ and known.intersection(reads):
            return True
    return False


def test_a_name_read_from_elsewhere_reads_no_key() -> None:
    """`counts.surplus` is no `sampling.surplus`."""
    tree = ast.parse("def f(c: SamplingConfig): a, b = config.rollout, config.sampling; x = a.y")
    assert names_of_section(tree, "sampling", "SamplingConfig") == {"sampling", "c", "b"}


def test_every_configuration_key_is_read() -> None:
    unread = [key for key in documented_keys() if not is_section(key) and not is_read(key)]
    assert unread == []
