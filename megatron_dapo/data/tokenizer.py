"""Tokenizers behind one small interface, and the tokens at which generation stops."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import jinja2
import sentencepiece
import transformers

Message = Mapping[str, str]
"""One turn of a conversation: {"role": ..., "content": ...}."""


class Tokenizer(Protocol):
    """What the rest of the package needs of a tokenizer."""

    @property
    def eos_id(self) -> int | None:
        """Token that ends a text."""

    @property
    def pad_id(self) -> int:
        """Token for padding; often equal to `eos_id`, so masks never come from token values."""

    def __len__(self) -> int:
        """Number of ids, added tokens included; the model's embedding may have more rows."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`. Nothing is added; special tokens written in the text count as one."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, without special tokens and ids that the tokenizer lacks. From any
        thread."""

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        """Conversation as text, ending where the assistant's answer begins."""


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Whatever the libraries raise over a damaged file tells which tokenizer it is."""
    try:
        yield
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{error!r:.300}"
        raise ValueError(f"tokenizer {path} cannot be read: {reason}. Fetch it again") from error


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer folder."""

    def __init__(self, folder: Path, *, trust_remote_code: bool = False) -> None:
        with _named(folder):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        self._folder = folder
        self._decoding = threading.Lock()

    @property
    def eos_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def pad_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return pad if pad is not None else (self.eos_id or 0)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        with self._decoding:  # not every tokenizer may be used from two threads
            text = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        assert isinstance(text, str), "one sequence of ids decodes to one text"
        return text

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"data.prompt_format=chat, but the tokenizer in {self._folder} has no chat "
                "template; use prompt_format dapo or plain"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"data.prompt_format=chat: the chat template in {self._folder} refuses messages of "
                f"({', '.join(message['role'] for message in messages)}): {error}"
            ) from error
        assert isinstance(text, str), "tokenize=False renders one conversation to one text"
        return text


class SentencePieceTokenizer:
    """A SentencePiece .model file."""

    def __init__(self, model_file: Path) -> None:
        with _named(model_file):
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        self._model_file = model_file

    @property
    def eos_id(self) -> int | None:
        eos = self._processor.eos_id()
        return eos if eos >= 0 else None

    @property
    def pad_id(self) -> int:
        pad = self._processor.pad_id()
        return pad if pad >= 0 else (self.eos_id or 0)

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text, add_bos=False, add_eos=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        size = len(self)
        return self._processor.decode([token for token in token_ids if 0 <= token < size])

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        raise ValueError(
            f"data.prompt_format=chat, but the SentencePiece model {self._model_file} has no chat "
            "template; use prompt_format dapo or plain"
        )


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of a SentencePiece .model file.

    Raises:
        ValueError: nothing there to load, a file of it is damaged, or the folder asks to run its
            own Python (`auto_map`) and `trust_remote_code` is off.
    """
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path)
    if not path.is_dir():
        raise ValueError(f"tokenizer {path}: neither a folder nor a SentencePiece .model file")
    if not trust_remote_code:
        _refuse_remote_code(path)
    if (path / "tokenizer.json").is_file() or (path / "vocab.json").is_file():
        return HuggingFaceTokenizer(path, trust_remote_code=trust_remote_code)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model")
    raise ValueError(
        f"tokenizer folder {path} has none of tokenizer.json, vocab.json and tokenizer.model; "
        "point model.tokenizer at a folder that does"
    )


def _refuse_remote_code(folder: Path) -> None:
    for name in ("tokenizer_config.json", "config.json"):
        if "auto_map" in _read_json(folder / name):
            raise ValueError(
                f"{folder / name} has auto_map: it would run Python from that folder. Use a model "
                "of a built-in architecture, or read the code and set model.trust_remote_code=true"
            )


def _read_json(file: Path) -> dict[str, object]:
    """Content of a JSON file that holds an object; empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); fetch the model folder again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def stop_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every token that ends a response, ascending: the union of what the model's files say.

    Base models ship files that disagree (Qwen2.5: config 151643, tokenizer 151645); sampling with
    only one of them never stops.

    Args:
        folder: model folder; config.json and generation_config.json are read.
        tokenizer: adds its end token.

    Raises:
        ValueError: none of the three names a stop token, or an entry is not an id.
    """
    stops: set[int] = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
    for name in ("config.json", "generation_config.json"):
        entry = _read_json(folder / name).get("eos_token_id")
        for token in entry if isinstance(entry, list) else [entry]:
            if token is None:
                continue
            if not isinstance(token, int) or token < 0:
                raise ValueError(f"{folder / name}: eos_token_id {entry!r} must be ids >= 0")
            stops.add(token)
    if not stops:
        raise ValueError(
            f"no stop token: config.json and generation_config.json of {folder} have no "
            "eos_token_id and the tokenizer has no end token; responses would never stop"
        )
    return tuple(sorted(stops))
