"""Responses on the disk as soon as they are complete: a run that is killed samples none again.

    run_dir/rollouts/version_00000012.jsonl
        {"format": 1, "logprobs": ..., "weights": ...}      digest of all that the engines held
        DIGEST REQUEST {"tokens": ..., ...}                  a response a line, flushed

A response is found again by the very same request to the very same weights, and else by nothing: a
run that went on from an older checkpoint, with other numbers or with other keys, samples anew.
Which step it belongs to, whether its group is mixed and what it is worth is decided as if an engine
had just answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_dapo.config.whole_files import sync_directory
from megatron_dapo.rollout.engine import Generate, GenerationRequest, GenerationResult
from megatron_dapo.rollout.group_state import packed_numbers, unpacked_numbers
from megatron_dapo.rollout.weight_update import Digests

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
"""In a run directory."""
FORMAT = 1
MOST_VERSIONS = 20
"""Files that are kept where no checkpoint comes for long (checkpoint.every=0)."""
_FILE = re.compile(r"version_(\d{8,})\.jsonl")
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
"""A link in its place may lead to anyone's file, which is not ours to empty."""


class ResponseStore:
    """Between the sampling and the engines. One event loop calls it, but for `forget_before`.

    Args:
        folder: made when the first response comes.
        logprobs: which ones the engines return (`rollout.logprobs`).
    """

    def __init__(self, folder: Path, logprobs: str) -> None:
        self._folder = folder
        self._logprobs = logprobs
        self._file: ResponseFile | None = None
        self._waiting: list[tuple[ResponseFile, str, bytes]] = []
        self._turn = asyncio.Lock()
        self._failed = False

    async def serve(self, version: int, digests: Sequence[Digests] | None) -> None:
        """The engines hold these weights from now on.

        Args:
            digests: of all that an engine holds. None: nobody knows, and nothing is stored.
        """
        if digests is None:
            self._close_file()
            return
        header = self._header(digests)
        path = self._folder / f"version_{version:08d}.jsonl"
        if self._file is not None and (self._file.path, self._file.header) == (path, header):
            return
        self._close_file()
        self.forget_before(version - MOST_VERSIONS + 1)
        try:
            self._file = await asyncio.to_thread(ResponseFile, path, header, version)
        except OSError as error:
            self._note(error)

    async def sampled(self, request: GenerationRequest, generate: Generate) -> GenerationResult:
        """What `generate` gives, now or before this process began; on the disk once it is given.

        Raises:
            EngineError: of `generate`.
        """
        file = self._file
        if file is None:
            return await generate(request)
        key = request_key(request)
        if file.holds(key):  # thousands of them at once: engines must not seem silent meanwhile
            stored = await asyncio.to_thread(file.find, key)
            if stored is not None:
                return stored
        result = await generate(request)
        versions = {version for _, version in result.version_spans}
        if file is self._file and versions == {file.version} and result.finish_reason != "abort":
            await self._keep(file, key, result)
        return result

    def forget_before(self, version: int) -> None:
        """Delete what older weights sampled: no run goes on from before `version` any more."""
        try:
            names = os.listdir(self._folder) if self._folder.is_dir() else []
        except OSError as error:
            names = []
            logger.warning("old responses stay in %s: %s", self._folder, error)
        for match in filter(None, map(_FILE.fullmatch, names)):
            if int(match[1]) < version:
                try:
                    (self._folder / match[0]).unlink(missing_ok=True)
                except OSError as error:
                    logger.warning("old responses stay: %s", error)

    def close(self) -> None:
        """Release the file; closing again does nothing."""
        self._close_file()

    async def _keep(self, file: ResponseFile, key: str, result: GenerationResult) -> None:
        """All that wait are written by whoever comes first: one flush for many responses."""
        self._waiting.append((file, key, result_line(key, result)))
        async with self._turn:
            lines = [(name, line) for of, name, line in self._waiting if of is file]
            self._waiting = [entry for entry in self._waiting if entry[0] is not file]
            if lines and file is self._file:
                try:
                    await asyncio.to_thread(file.append, lines)
                except OSError as error:
                    self._note(error)

    def _header(self, digests: Sequence[Digests]) -> bytes:
        text = json.dumps([dict(sorted(worker.items())) for worker in digests])
        weights = hashlib.sha256(text.encode()).hexdigest()
        header = {"format": FORMAT, "logprobs": self._logprobs, "weights": weights}
        return json.dumps(header).encode() + b"\n"

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _note(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "responses are not stored, a killed run would sample them again: %s. Training "
                "goes on all the same.",
                error,
            )


class ResponseFile:
    """The responses of one version of the weights; from any thread.

    Args:
        path: what is there already is read, where it begins with `header`; else it goes.
        header: first line.
        version: of the weights.

    Raises:
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, header: bytes, version: int) -> None:
        self.path, self.header, self.version = path, header, version
        self._lock = threading.Lock()
        self._places: dict[str, tuple[int, int]] = {}
        """Request -> first byte of its line, and how many."""
        self._end = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, _OPEN, 0o644)
        try:
            self._recover()
        except OSError:
            self.close()
            raise
        if self._places:
            logger.info("%d responses of version %d are in %s", len(self._places), version, path)

    def holds(self, key: str) -> bool:
        """A response is stored for a request."""
        return key in self._places

    def find(self, key: str) -> GenerationResult | None:
        """The response that was stored for a request; None without one.

        Looked at once more: the disk, or another process, may have changed it since.
        """
        start, length = self._places.get(key, (0, 0))
        if not length:
            return None
        try:
            line = os.pread(self._descriptor, length, start)
        except OSError as error:
            logger.warning("%s: a response is sampled again: %s", self.path, error)
            return None
        if whole_line(line) != key:
            logger.warning("%s: a damaged response is sampled again", self.path)
            return None
        return read_result(line)

    def append(self, lines: Sequence[tuple[str, bytes]]) -> None:
        """Write (request, line) pairs and flush them; once it is closed, nothing.

        Raises:
            OSError: not all of it is on the disk; the next one begins where this one did.
        """
        with self._lock:
            if self._descriptor < 0:
                return
            self._write(b"".join(line for _, line in lines))
            for key, line in lines:
                self._places[key] = self._end, len(line)
                self._end += len(line)

    def close(self) -> None:
        """Closing again does nothing."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _write(self, data: bytes) -> None:
        """Behind what is there, to the disk."""
        written = os.pwrite(self._descriptor, data, self._end)
        if written != len(data):
            raise OSError(f"only {written} of {len(data)} bytes reached {self.path}")
        os.fsync(self._descriptor)

    def _recover(self) -> None:
        """Find what is whole, and cut off what a kill left half written."""
        damaged = 0
        with open(self._descriptor, "rb", closefd=False) as file:
            known = file.read(len(self.header)) == self.header
            self._end = len(self.header) if known else 0
            for start, line in _lines(file, self._end) if known else ():
                key = whole_line(line)
                if key is None:
                    damaged += 1
                else:
                    self._places[key] = start, len(line)
                    self._end = start + len(line)
        if damaged:
            logger.warning("%s: %d damaged responses are sampled again", self.path, damaged)
        os.ftruncate(self._descriptor, self._end)
        if not known:
            self._write(self.header)
            self._end = len(self.header)
            sync_directory(self.path.parent)


def request_key(request: GenerationRequest) -> str:
    """Changes with anything that a response depends on but the weights."""
    return hashlib.sha256(json.dumps(asdict(request)).encode()).hexdigest()


def result_line(key: str, result: GenerationResult) -> bytes:
    """One line of the file: a digest of what follows, the request, the response."""
    numbers = packed_numbers(result.token_ids, result.logprobs)
    told = {
        **numbers,
        "spans": result.version_spans,
        "finish_reason": result.finish_reason,
        "policy_version": result.policy_version,
    }
    rest = f"{key} {json.dumps(told)}".encode()
    return hashlib.sha256(rest).hexdigest().encode() + b" " + rest + b"\n"


def whole_line(line: bytes) -> str | None:
    """The request of a line that is as it was written; None of any other."""
    digest, _, rest = line.removesuffix(b"\n").partition(b" ")
    whole = line.endswith(b"\n") and hashlib.sha256(rest).hexdigest().encode() == digest
    return rest.partition(b" ")[0].decode() if whole else None


def read_result(line: bytes) -> GenerationResult:
    """The response of a line that `whole_line` found whole."""
    told = json.loads(line.split(b" ", 2)[2])
    tokens, logprobs = unpacked_numbers(told)
    return GenerationResult(
        token_ids=tokens,
        logprobs=logprobs,
        finish_reason=told["finish_reason"],
        version_spans=tuple((start, version) for start, version in told["spans"]),
        policy_version=told["policy_version"],
    )


def _lines(file: Iterator[bytes], start: int) -> Iterator[tuple[int, bytes]]:
    """Lines from here on, each with its first byte."""
    for line in file:
        yield start, line
        start += len(line)
