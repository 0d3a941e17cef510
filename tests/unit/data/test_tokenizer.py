from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from megatron_dapo.data.tokenizer import load_tokenizer, stop_token_ids
from tests.unit.data.word_tokenizer import WordTokenizer
from tests.unit.handed import Case, handed_cases

BOS, EOS = "<s>", "</s>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %} a"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A fast tokenizer that puts <s> in front of what it encodes by itself."""
    vocabulary = {BOS: 0, EOS: 1, "a": 2, "b": 3, "c": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, 0)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token=EOS, chat_template=TEMPLATE
    )
    assert fast.encode("a b") == [0, 2, 3]
    fast.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", handed_cases("h", "prompt_ids"))
def test_handed_prompt_has_one_bos(case: Case, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": " b c"}])
    ids = tokenizer.encode(rendered)
    assert ids == [0, 3, 4, 2]
    assert len(ids) == len(case["expect"]["ids"])
    assert ids.count(0) == case["expect"]["bos_count"]


def test_nothing_is_added_to_a_text_and_special_tokens_are_not_shown(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a b") == [2, 3]
    assert tokenizer.decode([0, 2, 3, 1]) == "a b"
    assert tokenizer.decode([2, 999]) == "a"
    assert (tokenizer.eos_id, tokenizer.pad_id, len(tokenizer)) == (1, 1, 5)


def test_a_folder_that_brings_its_own_code_is_refused(folder: Path) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": "x"}}))
    with pytest.raises(ValueError, match=r"auto_map.*trust_remote_code"):
        load_tokenizer(folder)


def test_a_place_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="neither a folder"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", "\x00", '{"model": 5}'])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"tokenizer {tmp_path} cannot be read|{tmp_path}/{name}"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_a_template_cannot_chat(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "a"}])


def test_messages_that_a_template_refuses_are_told_with_its_reason(folder: Path) -> None:
    template = "{{ raise_exception('no system role') }}"
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"\(system, user\): no system role"):
        load_tokenizer(folder).apply_chat_template(messages)


def test_a_sentencepiece_model_hides_behind_the_same_interface(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the sum of three and four is seven\nwhat is the sum of one and two\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=60,
        model_type="bpe",
        minloglevel=2,
    )
    for place in (tmp_path, tmp_path / "tokenizer.model"):
        tokenizer = load_tokenizer(place)
        ids = tokenizer.encode("the sum of two")
        assert ids
        assert {1, 2}.isdisjoint(ids)
        assert tokenizer.decode([1, *ids, 2, 10_000]) == "the sum of two"
        assert (tokenizer.eos_id, tokenizer.pad_id, len(tokenizer)) == (2, 2, 60)
        with pytest.raises(ValueError, match="no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


class FixedEnd(WordTokenizer):
    def __init__(self, eos: int | None) -> None:
        super().__init__()
        self.end = eos

    @property
    def eos_id(self) -> int | None:
        return self.end


def write_json(file: Path, **content: object) -> None:
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("case", handed_cases("h", "stop_ids"))
def test_handed_stop_tokens_are_the_union(case: Case, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", eos_token_id=case["input"]["config_eos"])
    write_json(tmp_path / "generation_config.json", eos_token_id=case["input"]["generation_eos"])
    stops = stop_token_ids(tmp_path, FixedEnd(case["input"]["tokenizer_eos"]))
    assert list(stops) == case["expect"]["stop_ids"]


def test_missing_stop_tokens_are_not_zero(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", eos_token_id=None)
    assert stop_token_ids(tmp_path, FixedEnd(0)) == (0,)
    with pytest.raises(ValueError, match="never stop"):
        stop_token_ids(tmp_path, FixedEnd(None))
    write_json(tmp_path / "config.json", eos_token_id=0)
    assert stop_token_ids(tmp_path, FixedEnd(None)) == (0,)
    write_json(tmp_path / "config.json", eos_token_id=["a"])
    with pytest.raises(ValueError, match="must be ids"):
        stop_token_ids(tmp_path, FixedEnd(0))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        stop_token_ids(tmp_path, FixedEnd(0))


def test_the_real_qwen_tokenizer(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "tokenizers" / "qwen2_5")
    assert len(tokenizer) == 151_665
    assert (tokenizer.eos_id, tokenizer.pad_id) == (151_645, 151_643)
    assert len(tokenizer.encode("Answer: 42")) == 5
    assert tokenizer.encode("<|im_end|>") == [151_645]
    assert tokenizer.decode([151_643, 151_657, 151_645, 151_665, 152_063]) == "<tool_call>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are Qwen")
    assert text.endswith("hi<|im_end|>\n<|im_start|>assistant\n")


def test_the_tiny_model_stops_at_its_end_token(shared_data: Path) -> None:
    folder = shared_data / "models" / "tiny_sum_sft"
    tokenizer = load_tokenizer(folder)
    assert stop_token_ids(folder, tokenizer) == (0,)
    assert tokenizer.pad_id == 1
    assert tokenizer.decode([*tokenizer.encode("3+8+5+9=\n"), 0, 1]) == "3+8+5+9=\n"
