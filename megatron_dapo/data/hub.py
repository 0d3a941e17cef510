"""Prompt files from the Hugging Face hub, where there is a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import httpx
import pydantic

CONNECT_SECONDS = 10.0
_HUB_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?::(?P<file>[^:]+))?")


class _File(pydantic.BaseModel):
    rfilename: str


class _DataSet(pydantic.BaseModel):
    """The part that we read of the hub's description of a data set."""

    siblings: list[_File]


class Hub(Protocol):
    """What is asked of a hub; `ConnectionError` where it cannot be reached."""

    def list_files(self, repo: str) -> Sequence[str]:
        """Files of a data set."""

    def download(self, repo: str, file: str) -> Path:
        """One file, in the local cache."""


class HuggingFaceHub:
    """huggingface.co, or what HF_ENDPOINT names; with the user's token where there is one."""

    def list_files(self, repo: str) -> Sequence[str]:
        import huggingface_hub
        from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

        if HF_HUB_OFFLINE:
            raise ConnectionError("HF_HUB_OFFLINE is set")
        token = huggingface_hub.get_token()
        try:
            answer = httpx.get(
                f"{ENDPOINT}/api/datasets/{repo}",
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=CONNECT_SECONDS,
                follow_redirects=True,
            ).raise_for_status()
            return [
                file.rfilename for file in _DataSet.model_validate_json(answer.content).siblings
            ]
        except (httpx.HTTPError, pydantic.ValidationError) as error:
            raise ConnectionError((str(error) or type(error).__name__).splitlines()[0]) from error

    def download(self, repo: str, file: str) -> Path:
        import huggingface_hub

        try:
            return Path(huggingface_hub.hf_hub_download(repo, file, repo_type="dataset"))
        except OSError as error:
            raise ConnectionError((str(error) or type(error).__name__).splitlines()[0]) from error


def find_file(name: str, hub: Hub) -> Path:
    """The local file `name`, or that of a hub id: `owner/name`, `owner/name:path/of/file`.

    Raises:
        ValueError: neither, the hub cannot be reached, or the data set has not exactly one
            .parquet or .jsonl file and none was named.
    """
    path = Path(name)
    hub_id = _HUB_ID.fullmatch(name)
    if path.exists() or hub_id is None or (not hub_id["file"] and path.suffix):
        return path
    repo, file = hub_id["repo"], hub_id["file"]
    try:
        return hub.download(repo, _choose(repo, hub.list_files(repo), file))
    except ConnectionError as error:
        raise ValueError(
            f"{name} is no file here, and as a data set of the Hugging Face hub it cannot be had "
            f"({error}). Without a network, fetch its .parquet or .jsonl file elsewhere and give "
            "the path"
        ) from error


def _choose(repo: str, files: Sequence[str], wanted: str | None) -> str:
    usable = [name for name in files if name.endswith((".parquet", ".jsonl"))]
    if wanted in usable:
        return wanted
    if wanted is not None or len(usable) != 1:
        found = ", ".join(usable) or "none"
        what = f"no file {wanted}" if wanted else f"{len(usable)} files that can be read"
        raise ValueError(
            f"{repo} has {what}; its .parquet and .jsonl files: {found}. Name one: {repo}:FILE"
        )
    return usable[0]
