from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dapo.config.schema import DataConfig
from megatron_dapo.data.prompts import PromptSet, PromptStream
from megatron_dapo.data.rows import normal_answer
from tests.unit.data.word_tokenizer import CountingTokenizer, WordTokenizer
from tests.unit.handed import Case, handed_cases


def data_config(path: Path, **options: object) -> DataConfig:
    fields = {"prompt_column": "prompt", "answer_column": "answer", "prompt_format": "plain"}
    return DataConfig(train=path, **fields | options)  # type: ignore[arg-type]


def load(path: Path, **options: object) -> PromptSet:
    return PromptSet.load(path, data_config(path, **options), WordTokenizer())


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("case", handed_cases("o", "read_jsonl"))
def test_handed_rows_are_accounted_for(case: Case, tmp_path: Path) -> None:
    expect, fields = case["expect"], case["input"]["fields"]
    path = tmp_path / "train.jsonl"
    path.write_text(case["input"]["text"])
    options = {"prompt_column": fields["prompt"], "answer_column": fields["answer"]}
    if expect["bad_lines"]:
        with pytest.raises(ValueError, match=rf"train\.jsonl.*line {expect['bad_lines'][0]}"):
            load(path, **options)
    if not expect["good_lines"]:
        with pytest.raises(ValueError, match="no prompt is left"):
            load(path, bad_rows="skip", **options)
        return
    loaded = load(path, bad_rows="skip", deduplicate=False, **options)
    assert [int(prompt.id) for prompt in loaded.prompts] == expect["good_lines"]
    assert {str(bad.line): bad.reason for bad in loaded.report.bad} == expect["reason"]
    duplicates = [list(lines) for lines in loaded.report.duplicate_lines]
    assert duplicates == expect.get("duplicate_lines", [])


@pytest.mark.parametrize("case", handed_cases("h", "prompt_limit"))
def test_handed_overlong_prompts_follow_the_policy(case: Case, tmp_path: Path) -> None:
    given_, expect = case["input"], case["expect"]
    texts = [
        " ".join(f"w{i}.{j}" for j in range(n)) for i, n in enumerate(given_["prompt_lengths"])
    ]
    path = write(tmp_path, *({"prompt": text, "answer": 1} for text in texts))
    limit = {"max_prompt_tokens": given_["max_prompt_tokens"]}
    loaded = load(path, overlong_prompts=given_["policy"], **limit)
    assert [int(prompt.id) - 1 for prompt in loaded.prompts] == expect["kept"]
    assert [line - 1 for line in loaded.report.overlong_lines] == expect["dropped"]
    assert f"{expect['count']} over 4 tokens dropped (lines 2)" in loaded.report.summary()
    with pytest.raises(ValueError, match=r"max_prompt_tokens=4.*lines 2"):
        load(path, overlong_prompts="error", **limit)
    cut = load(path, overlong_prompts="truncate_left", **limit).prompts[1]
    assert cut.text == "w1.2 w1.3 w1.4 w1.5"
    assert len(cut.token_ids) == 4


def test_both_answer_types_and_nested_columns_are_read(tmp_path: Path) -> None:
    message = [{"role": "user", "content": "1 + 1?"}]
    path = write(
        tmp_path,
        {"prompt": message, "reward_model": {"ground_truth": "034"}, "data_source": "math"},
        {"prompt": "2 + 2?", "reward_model": {"ground_truth": 34}},
        {"prompt": "3 + 3?", "reward_model.ground_truth": "\\frac{1}{2} "},
    )
    loaded = load(path, answer_column="reward_model.ground_truth")
    assert [prompt.answer for prompt in loaded.prompts] == ["34", "34", "\\frac{1}{2}"]
    assert [prompt.source for prompt in loaded.prompts] == ["math", "", ""]
    assert loaded.prompts[0].text == "1 + 1?"
    assert loaded.report.text_answer_lines == (3,)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("22099999999999998951424", "22099999999999998951424"),
        (" +007 ", "7"),
        ("-0", "0"),
        ("-12.000", "-12"),
        ("14.", "14"),
        ("0.5", "0.5"),
        ("16 - 3 = <<16-3=13>>13\n#### 013", "13"),
        ("one\n#### two\nthree", "one\n#### two\nthree"),
        ("1,234", "1,234"),
        ("336^\\circ", "336^\\circ"),
        ("٣", "٣"),
    ],
)
def test_answers_have_one_normal_form(text: str, normal: str) -> None:
    assert normal_answer(text) == normal


def test_no_integer_passes_through_a_float(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    lines = ["22099999999999998951424", "22099999999999998951424.0", "14.0"]
    path.write_text("".join(f'{{"prompt": "{i}", "answer": {n}}}\n' for i, n in enumerate(lines)))
    answers = [prompt.answer for prompt in load(path).prompts]
    assert answers == ["22099999999999998951424", "22099999999999998951424", "14"]


BAD_LINES = {
    b'{"prompt": "a", "answer": 1': "json",
    b"[1, 2]": "json",
    b"null": "json",
    b'{"prompt": "a\x00", "answer": 1}': "json",
    b'{"prompt": "\xff", "answer": 1}': "encoding",
    b"\x1f\x8b\x08\x00\xff": "encoding",
    b'{"prompt": "", "answer": 1}': "prompt",
    b'{"prompt": [], "answer": 1}': "prompt",
    b'{"prompt": 5, "answer": 1}': "prompt",
    b'{"prompt": [{"role": "user"}], "answer": 1}': "prompt",
    b'{"prompt": "\\ud800", "answer": 1}': "prompt",
    b'{"answer": 1}': "prompt",
    b'{"prompt": "a", "answer": true}': "answer",
    b'{"prompt": "a", "answer": " "}': "answer",
    b'{"prompt": "a", "answer": NaN}': "answer",
    b'{"prompt": "a", "answer": {"b": 1}}': "answer",
    b"[" * 100_000: "json",
    b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}": "json",
}


def test_each_broken_line_is_counted_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    good = b'{"prompt": "fine", "answer": 1}\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + b"\n".join(BAD_LINES) + b"\n" + good)
    loaded = load(path, bad_rows="skip", deduplicate=False)
    assert [(bad.line, bad.reason) for bad in loaded.report.bad] == [
        (line, reason) for line, reason in enumerate(BAD_LINES.values(), start=3)
    ]
    assert [prompt.id for prompt in loaded.prompts] == ["1", str(3 + len(BAD_LINES))]
    assert loaded.report.rows == len(BAD_LINES) + 2


def test_a_wrong_column_name_is_answered_with_the_columns_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "1 + 1?", "answer": 2})
    with pytest.raises(ValueError, match="no prompt; columns are question, answer"):
        load(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load(tmp_path / "missing.jsonl")
    (tmp_path / "train.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        load(tmp_path / "train.csv")
    (tmp_path / "train.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match="not a parquet file"):
        load(tmp_path / "train.parquet")


class Silent(WordTokenizer):
    def encode(self, text: str) -> list[int]:
        return []


def test_a_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "\u200b", "answer": 1})
    with pytest.raises(ValueError, match="line 1: the tokenizer finds no token"):
        PromptSet.load(path, data_config(path), Silent())


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name the"):
        load(tmp_path)


def test_names_that_no_file_can_hold_are_bad_rows(tmp_path: Path) -> None:
    half = "\ud800"
    path = write(
        tmp_path,
        {"prompt": "a", "answer": 1, "data_source": half},
        {"prompt": "b", "answer": 1, "extra_info": {"index": half}},
        {"prompt": [{"role": half, "content": "c"}], "answer": 1},
        {"prompt": "d", "answer": 1, "data_source": None, "extra_info": {"index": 4}},
    )
    loaded = load(path, bad_rows="skip")
    assert [str(bad.reason) for bad in loaded.report.bad] == ["encoding", "encoding", "prompt"]
    assert [prompt.id for prompt in loaded.prompts] == ["4"]


def test_text_of_a_parquet_file_that_is_no_utf_8_is_a_bad_row(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
    path = tmp_path / "train.parquet"
    table = pyarrow.table({"prompt": texts, "answer": ["1", "2", "3"]})
    pyarrow.parquet.write_table(table, path)
    loaded = load(path, bad_rows="skip")
    assert [(bad.line, bad.reason) for bad in loaded.report.bad] == [(2, "encoding")]
    assert [prompt.text for prompt in loaded.prompts] == ["a", "c"]


def test_a_parquet_value_that_python_has_none_for_is_a_bad_row(tmp_path: Path) -> None:
    when = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    path = tmp_path / "train.parquet"
    table = pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"], "when": when})
    pyarrow.parquet.write_table(table, path)
    loaded = load(path, bad_rows="skip")
    assert [(bad.line, bad.reason) for bad in loaded.report.bad] == [(2, "json")]
    assert [prompt.text for prompt in loaded.prompts] == ["a"]


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    table = pyarrow.table({"prompt": [f"{n} + {n}?" for n in range(5000)], "answer": ["1"] * 5000})
    pyarrow.parquet.write_table(table, path)
    content = bytearray(path.read_bytes())
    content[200:1200] = b"\xa5" * 1000
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.parquet is not a parquet file, or damaged"):
        load(path)


def test_copies_are_dropped_and_contradictions_reported(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "What is x?", "answer": 1},
        {"prompt": "What is y?", "answer": 2},
        {"prompt": "What is x?", "answer": 1},
        {"prompt": "what is X", "answer": 3},
    )
    loaded = load(path)
    assert [prompt.id for prompt in loaded.prompts] == ["1", "2", "4"]
    assert loaded.report.duplicate_lines == ((1, 3),)
    assert loaded.report.conflicting_lines == ((1, 4),)
    assert "1 copies dropped" in loaded.report.summary()
    assert [prompt.id for prompt in load(path, deduplicate=False).prompts] == ["1", "2", "3", "4"]


def test_ids_are_the_file_s_own_where_they_are_unique(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "answer": i, "extra_info": {"index": i % 2}} for i in range(3)]
    assert [p.id for p in load(write(tmp_path, *rows)).prompts] == ["1", "2", "3"]
    assert [p.id for p in load(write(tmp_path, *rows[:2])).prompts] == ["0", "1"]


def test_parquet_rows_equal_jsonl_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": i, "data_source": "s"}
        for i in range(5)
    ]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert load(path).prompts == load(write(tmp_path, *rows)).prompts


def test_a_floating_point_column_must_hold_exact_integers(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 14.0}, {"prompt": "b", "answer": 2.21e22}]
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    loaded = load(path, bad_rows="skip")
    assert [prompt.answer for prompt in loaded.prompts] == ["14"]
    assert "digits may be lost" in str(loaded.report.bad[0])


def test_a_bad_prompt_format_names_the_line(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path, {"prompt": turns, "answer": 1})
    with pytest.raises(ValueError, match=r"train\.jsonl line 1: .*prompt_format=chat"):
        load(path)
    assert load(path, prompt_format="chat").prompts[0].text == "<system> s <user> u <assistant>"


def test_facts_of_the_dapo_set(shared_data: Path) -> None:
    path = shared_data / "dapo_math_17k.parquet"
    config = data_config(path, answer_column="reward_model.ground_truth")
    loaded = PromptSet.load(path, config, CountingTokenizer())
    report = loaded.report
    assert (report.rows, report.kept) == (17_917, 17_290)
    assert report.bad == report.text_answer_lines == report.overlong_lines == ()
    assert len(report.conflicting_lines) == 24
    assert len({prompt.id for prompt in loaded.prompts}) == 17_290
    assert "22099999999999998951424" in {prompt.answer for prompt in loaded.prompts}


def test_facts_of_the_aime_sets(shared_data: Path) -> None:
    answer = {"answer_column": "reward_model.ground_truth"}
    published = load(shared_data / "aime-2024.parquet", **answer)
    assert (published.report.rows, published.report.kept) == (960, 30)
    assert {len(lines) for lines in published.report.duplicate_lines} == {32}
    derived = load(shared_data / "aime_2024.jsonl", **answer)
    assert sorted(p.answer for p in published.prompts) == sorted(p.answer for p in derived.prompts)
    newer = load(shared_data / "aime_2025.jsonl", **answer)
    assert [p.answer for p in newer.prompts if not p.answer.isdecimal()] == ["336^\\circ"]


def prompt_set(tmp_path: Path, count: int) -> PromptSet:
    return load(write(tmp_path, *({"prompt": str(i), "answer": i} for i in range(count))))


@pytest.mark.parametrize("case", handed_cases("j", "order_after_resume"))
def test_handed_order_after_resume_is_the_uninterrupted_one(case: Case, tmp_path: Path) -> None:
    given_ = case["input"]
    prompts = prompt_set(tmp_path, given_["items"])
    whole = PromptStream(prompts, given_["seed"])
    expected = [whole.take(given_["batch"]) for _ in range(given_["total"])]
    first = PromptStream(prompts, given_["seed"])
    got = [first.take(given_["batch"]) for _ in range(given_["stop_after"])]
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptStream(prompts, given_["seed"])
    second.load_state_dict(state)
    got += [second.take(given_["batch"]) for _ in range(given_["total"] - given_["stop_after"])]
    assert (got == expected) is case["expect"]["equal_to_uninterrupted"]


@settings(deadline=None, max_examples=50)
@given(takes=st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=6))
def test_what_is_put_back_comes_again_and_leaves_no_trace(
    tmp_path_factory: pytest.TempPathFactory, takes: list[tuple[int, int]]
) -> None:
    prompts = prompt_set(tmp_path_factory.mktemp("prompts"), 10)
    stream, plain = PromptStream(prompts, 3), PromptStream(prompts, 3)
    for count, more in takes:
        taken = stream.take(count + more)
        stream.put_back(more)
        assert taken[:count] == plain.take(count)
        if count or more:  # at the end of an epoch the next one has not begun
            assert stream.state_dict() == plain.state_dict()


def test_prompts_that_were_not_taken_cannot_be_put_back(tmp_path: Path) -> None:
    stream = PromptStream(prompt_set(tmp_path, 5), 1)
    stream.take(3)
    with pytest.raises(RuntimeError, match="4 prompts are put back, but 3 were taken"):
        stream.put_back(4)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 25), max_size=12), st.integers(0, 12), st.integers(0, 9))
def test_any_stop_and_any_sizes_give_the_same_stream(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], stop: int, seed: int
) -> None:
    prompts = prompt_set(tmp_path_factory.mktemp("prompts"), 10)
    whole = PromptStream(prompts, seed).take(sum(sizes))
    stream = PromptStream(prompts, seed)
    taken = []
    for number, size in enumerate(sizes):
        if number == stop:
            state = stream.state_dict()
            stream = PromptStream(prompts, seed)
            stream.load_state_dict(state)
        taken += stream.take(size)
    assert taken == whole
    for epoch in range(sum(sizes) // 10):
        assert len({prompt.id for prompt in whole[10 * epoch : 10 * epoch + 10]}) == 10
    counts = Counter(prompt.id for prompt in whole)
    assert not whole or max(counts.values()) <= -(-sum(sizes) // 10)


def test_seed_and_epoch_decide_the_order(tmp_path: Path) -> None:
    prompts = prompt_set(tmp_path, 50)
    stream = PromptStream(prompts, 1)
    first, second = stream.take(50), stream.take(50)
    assert stream.epoch == 1
    assert first != second
    assert PromptStream(prompts, 1).take(50) == first
    assert PromptStream(prompts, 2).take(50) != first


def test_other_data_or_another_seed_cannot_resume(tmp_path: Path) -> None:
    state = PromptStream(prompt_set(tmp_path, 5), 1).state_dict()
    with pytest.raises(RuntimeError, match="seed=1"):
        PromptStream(prompt_set(tmp_path, 5), 2).load_state_dict(state)
    with pytest.raises(RuntimeError, match="prompts="):
        PromptStream(prompt_set(tmp_path, 6), 1).load_state_dict(state)
