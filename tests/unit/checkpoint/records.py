"""What a manifest says of files that a test has written."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_dapo.checkpoint.durable_files import FileRecord, list_files


def recorded(folder: Path) -> dict[str, FileRecord]:
    """Size and digest of every file below `folder`."""
    content = {name: (folder / name).read_bytes() for name in list_files(folder)}
    return {
        name: FileRecord(bytes=len(found), sha256=hashlib.sha256(found).hexdigest())
        for name, found in content.items()
    }
