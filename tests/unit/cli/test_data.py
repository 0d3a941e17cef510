"""`megatron-dapo data`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dapo.cli.main import main
from tests.unit.data.chat_server import completion, running_server
from tests.unit.data.test_integer_answers import dice, good_reply

GOOD = {"question": "1 + 1?", "answer": 2}
COLUMNS = ["data.prompt_column=question", "answer_column=answer"]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_check_counts_rows_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD, GOOD, {"question": "?"})
    report = tmp_path / "report.json"
    words = ["data", "check", file, *COLUMNS, "bad_rows=skip", "--report", str(report)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "bad: answer" in shown
    assert "lines 3" in shown
    assert json.loads(report.read_text())["bad"]["by_reason"] == {"answer": 1}


def test_check_refuses_what_a_run_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD, {"question": "?"})
    assert main(["data", "check", file, *COLUMNS]) == 78
    assert "line 2: answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("promt_column=x", "Did you mean data.prompt_column?"),
        ("max_prompt_tokens=0", "data.max_prompt_tokens=0"),
        ("bad_rows=maybe", "data.bad_rows='maybe': input should be 'error' or 'skip'. A row that"),
    ],
)
def test_wrong_keys_are_explained(
    word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    assert main(["data", "check", file, word]) == 78
    assert message in capsys.readouterr().err


def test_a_missing_file_is_bad_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", "missing.jsonl"]) == 78
    assert "missing.jsonl does not exist" in capsys.readouterr().err


def test_prepare_writes_a_file_that_check_accepts(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD, GOOD)
    out = tmp_path / "clean.parquet"
    assert main(["data", "prepare", file, *COLUMNS, "--out", str(out)]) == 0
    assert main(["data", "check", str(out)]) == 0
    assert (tmp_path / "clean.parquet.report.json").is_file()
    assert main(["data", "prepare", file, *COLUMNS, "--out", str(out)]) == 78


def test_decontaminate_prints_pairs_and_writes_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"question": "2 + 2?", "answer": 4}
    file = write(tmp_path / "rows.jsonl", GOOD, other)
    bench = write(tmp_path / "bench.jsonl", {"problem": "$1+1$?"})
    out = tmp_path / "clean.jsonl"
    words = ["data", "decontaminate", file, *COLUMNS, "--out", str(out), "--against"]
    assert main([*words, f"{bench}:problem"]) == 0
    shown = capsys.readouterr().out
    assert f"line 1 and {bench} line 1: the same question" in shown
    assert "1 of 2 rows overlap" in shown
    assert "2 + 2?" in out.read_text()
    assert main([*words, bench]) == 78


def test_integer_answers_rewrites_through_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = dice(7)
    file, out = write(tmp_path / "rows.jsonl", row, {"prompt": "1?", "answer": 1}), "out.jsonl"
    words = ["data", "integer-answers", file, "answer_column=answer", "--out", str(tmp_path / out)]
    with running_server() as server:
        server.answers = [(200, completion(good_reply(row["prompt"])))]
        assert main([*words, "--endpoint", server.url]) == 0
    shown = capsys.readouterr().out
    assert "1 rewritten" in shown
    assert "1 kept" in shown
    assert main(["data", "check", str(tmp_path / out)]) == 0


def test_integer_answers_says_when_the_server_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_dapo.data.chat_endpoint.FIRST_BACKOFF_SECONDS", 0.001)
    file = write(tmp_path / "rows.jsonl", *dice(7))
    words = ["data", "integer-answers", file, "answer_column=answer"]
    words += ["--out", str(tmp_path / "out.jsonl"), "--endpoint"]
    assert main([*words, "unix:/nowhere/socket"]) == 1
    assert "see that the server runs" in capsys.readouterr().err
    assert main([*words, "https://example.com"]) == 78
    assert "--remote" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "decontaminate"])
def test_a_report_overwrites_no_data_and_is_refused_before_the_work(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    words = ["data", command, file, *COLUMNS]
    words += ["--against", file] if command == "decontaminate" else []
    before = Path(file).read_text()
    for report, message in (
        (file, "must end in .json"),
        (str(tmp_path / "nowhere" / "report.json"), "there is no folder"),
    ):
        assert main([*words, "--report", report]) == 78
        assert message in capsys.readouterr().err
    assert Path(file).read_text() == before


def test_decontaminate_writes_no_empty_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", GOOD)
    out, report = tmp_path / "clean.jsonl", tmp_path / "report.json"
    words = ["data", "decontaminate", file, *COLUMNS, "--against", file, "--out", str(out)]
    assert main([*words, "--report", str(report)]) == 78
    assert "nothing is left" in capsys.readouterr().err
    assert not out.exists()
    assert len(json.loads(report.read_text())["pairs"]) == 1


@pytest.mark.parametrize(
    ("out", "words", "message"),
    [
        ("o.csv", [], "must end in .parquet or .jsonl"),
        ("o.jsonl", ["--attempts", "0"], "attempts=0"),
    ],
)
def test_integer_answers_refuses_its_options_before_it_asks_a_server(
    out: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", *dice(7))
    nobody = ["--endpoint", "unix:/nowhere/socket"]
    call = ["data", "integer-answers", file, "--out", str(tmp_path / out), *nobody, *words]
    assert main(call) == 78
    assert message in capsys.readouterr().err
