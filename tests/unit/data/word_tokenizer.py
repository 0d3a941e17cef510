"""A tokenizer for tests: one token a word, ids handed out in order of appearance."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dapo.data.tokenizer import Message


class WordTokenizer:
    def __init__(self) -> None:
        self.words = ["<eos>"]

    @property
    def eos_id(self) -> int | None:
        return 0

    @property
    def pad_id(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        self.words += [word for word in dict.fromkeys(text.split()) if word not in self.words]
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[i] for i in token_ids if i)

    def apply_chat_template(self, messages: Sequence[Message]) -> str:
        return " ".join(f"<{turn['role']}> {turn['content']}" for turn in messages) + " <assistant>"


class CountingTokenizer(WordTokenizer):
    """Like it, but for many words: the ids say nothing."""

    def encode(self, text: str) -> list[int]:
        return [1] * len(text.split())
