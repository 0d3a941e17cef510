"""Check the weights of a Hugging Face folder by what lies on the disk.

`python -m megatron_dapo.checkpoint.folder_check FOLDER` reads the expected tensors as JSON from
standard input and names every fault. An export runs it as a process of its own, so that nothing
the writer believes can hide what it wrote. No torch: it starts quickly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from megatron_dapo.config.weight_files import INDEX_FILE, SINGLE_FILE, read_header

LONGEST_SECONDS = 600
"""For the headers alone: a stalled file system is reported, not waited for."""


class TensorRecord(TypedDict):
    """What a safetensors header says of one tensor."""

    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class ExportCheck:
    """Verdict on the names of an exported folder."""

    ok: bool
    names: tuple[str, ...]
    """Files and tensors that are missing."""


def check_export(
    weight_map: Mapping[str, str],
    files: Mapping[str, Collection[str]],
    expected: Collection[str] = (),
) -> ExportCheck:
    """Compare an index with the tensors that its files really hold.

    Args:
        weight_map: tensor name -> file name, from the index.
        files: file name -> names of the tensors in it, of each file that exists.
        expected: names that the model needs.
    """
    missing = sorted(set(weight_map.values()) - set(files))
    missing += sorted(n for n, file in weight_map.items() if file in files and n not in files[file])
    missing += sorted(set(expected) - set(weight_map))
    return ExportCheck(ok=not missing, names=tuple(missing))


def folder_faults(folder: Path, expected: Mapping[str, TensorRecord]) -> Iterator[str]:
    """Whatever differs from exactly the `expected` tensors, one message each."""
    files: dict[str, dict[str, TensorRecord]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        if header is None:
            yield f"{path.name} is not as long as its header says"
            continue
        header.pop("__metadata__", None)
        files[path.name] = {
            name: TensorRecord(dtype=entry["dtype"], shape=entry["shape"])
            for name, entry in header.items()
        }
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
    else:
        weight_map = dict.fromkeys(files.get(SINGLE_FILE, {}), SINGLE_FILE)
    for name in check_export(weight_map, files, expected).names:
        yield f"{name!r} is missing"
    for file, tensors in files.items():
        for name, record in tensors.items():
            if name not in expected:
                yield f"{name!r} in {file} is no tensor of the model"
            elif record != expected[name]:
                yield f"{name!r} in {file} is {record}, must be {expected[name]}"
            if weight_map.get(name) != file:
                yield f"{name!r} in {file} is not where the index looks for it"


def check_in_fresh_process(folder: Path, expected: Mapping[str, TensorRecord]) -> None:
    """Have another process find exactly the `expected` tensors in the folder.

    Raises:
        RuntimeError: it found a fault, or could not look.
    """
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dapo.checkpoint.folder_check", str(folder)],
        input=json.dumps(expected),
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the exported folder {folder} is not what the model needs: "
            f"{(done.stdout or done.stderr).strip()}"
        )


def main() -> int:
    """Write the faults to standard output; 1 when there are any."""
    faults = list(folder_faults(Path(sys.argv[1]), json.load(sys.stdin)))
    sys.stdout.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
