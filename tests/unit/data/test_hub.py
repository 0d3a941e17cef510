from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_dapo.data.hub import HuggingFaceHub, find_file


class ScriptedHub:
    def __init__(self, *files: str, reachable: bool = True) -> None:
        self.files = files
        self.reachable = reachable

    def list_files(self, repo: str) -> Sequence[str]:
        if not self.reachable:
            raise ConnectionError("no route")
        return self.files

    def download(self, repo: str, file: str) -> Path:
        return Path("/cache") / repo / file


def test_a_local_path_asks_no_hub(tmp_path: Path) -> None:
    hub = ScriptedHub(reachable=False)
    (tmp_path / "rows.jsonl").touch()
    assert find_file(str(tmp_path / "rows.jsonl"), hub) == tmp_path / "rows.jsonl"
    assert find_file("data/missing.jsonl", hub) == Path("data/missing.jsonl")


def test_a_hub_id_names_its_only_file_or_the_one_that_is_asked_for() -> None:
    one = ScriptedHub("README.md", "data/train.parquet")
    assert find_file("owner/set", one) == Path("/cache/owner/set/data/train.parquet")
    two = ScriptedHub("a.jsonl", "b.jsonl")
    assert find_file("owner/set:b.jsonl", two) == Path("/cache/owner/set/b.jsonl")
    with pytest.raises(ValueError, match=r"2 files.*a\.jsonl, b\.jsonl.*owner/set:FILE"):
        find_file("owner/set", two)
    with pytest.raises(ValueError, match=r"no file c\.jsonl"):
        find_file("owner/set:c.jsonl", two)


def test_without_a_network_the_message_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"owner/set is no file here.*no route.*give the path"):
        find_file("owner/set", ScriptedHub(reachable=False))


def test_offline_mode_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConnectionError, match="HF_HUB_OFFLINE"):
        HuggingFaceHub().list_files("owner/set")
