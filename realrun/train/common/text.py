"""Encode training text, the lab's library files or a user's folder, as token arrays.

Documents are separated by the end-of-text token if the model has such a token. Held-out text comes from other files
than training text; the lab's split is that of its prompts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
from transformers import PreTrainedTokenizerBase

from realrun.pairs.library_text import library_files
from realrun.train.common.loop import Tokens
from specsim.io.errors import InputError
from specsim.io.files import digest, replacing
from specsim.io.json import parse_json

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
HELD_OUT_EVERY = 10  # every tenth document is held out
BATCH_DOCUMENTS = 64


class Row(TypedDict):
    """A line of a .jsonl file."""

    text: str


@dataclass(frozen=True)
class Corpus:
    """Token arrays [n], int32. name : "lab", or the last part of the folder's path."""

    name: str
    train: Tokens
    held_out: Tokens


def load_corpus(
    tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None, folder: Path | None, cache: Path
) -> Corpus:
    """Encode the lab's text or that of a folder; text that was encoded before is read from the cache.

    A folder, with its subfolders, gives *.txt, *.md and *.py files, a document each, and *.jsonl files, a document
    {"text": ...} per line. Every tenth document is held out; of fewer than ten documents, the last tenth of each.
    Raises InputError if the folder does not exist or holds no text.
    """
    if folder is None:
        parts = [[source.text for source in library_files(split)] for split in ("train", "held_out")]
    else:
        parts = _split(list(_documents(folder)))
        if not parts[0]:
            raise InputError(f"{folder} holds no text; put {', '.join(f'*{s}' for s in SUFFIXES)} files there")
    tokens = [_encoded(tokenizer, eos_token_id, documents, cache) for documents in parts]
    return Corpus("lab" if folder is None else folder.resolve().name, *tokens)


def _split(documents: Sequence[str]) -> list[list[str]]:
    """Split documents into those to train on and those held out."""
    last = HELD_OUT_EVERY - 1
    if len(documents) <= last:
        cuts = [len(document) - len(document) // HELD_OUT_EVERY for document in documents]
        pieces = [(document[:cut], document[cut:]) for document, cut in zip(documents, cuts, strict=True)]
        return [[before for before, _ in pieces], [after for _, after in pieces]]
    train = [document for number, document in enumerate(documents) if number % HELD_OUT_EVERY != last]
    return [train, list(documents[last::HELD_OUT_EVERY])]


def _documents(folder: Path) -> Iterator[str]:
    """Read the documents that are not empty, in the order of their paths."""
    if not folder.is_dir():
        raise InputError(f"text folder {folder} does not exist; give a folder of {', '.join(SUFFIXES)} files")
    for path in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text ({error}); save it as UTF-8 or remove it") from None
        yield from (d for d in (_rows(path, text) if path.suffix == ".jsonl" else [text]) if d.strip())


def _rows(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):  # JSON text may hold other line separators
        if not line.strip():
            continue
        yield parse_json(line, f"{path}:{number}", Row, invalid='correct the line: {"text": ...}')["text"]


def _encoded(
    tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None, documents: Sequence[str], cache: Path
) -> Tokens:
    """Encode all documents as an array, from the cache if it has them."""
    texts = (bytes.fromhex(digest(document.encode(errors="surrogatepass"), length=64)) for document in documents)
    path = cache / f"corpus-{digest(f'{tokenizer_digest(tokenizer)} {eos_token_id}', *texts)}.npy"
    if not path.exists():
        save_tokens(encode(tokenizer, eos_token_id, documents), path)
    return read_tokens(path)


def encode(tokenizer: PreTrainedTokenizerBase, eos_token_id: int | None, documents: Sequence[str]) -> Tokens:
    """Encode all documents as an array, each followed by the end-of-text token if the model has it."""
    arrays = [np.zeros(0, np.int32)]
    for begin in range(0, len(documents), BATCH_DOCUMENTS):
        rows = tokenizer(list(documents[begin : begin + BATCH_DOCUMENTS]), verbose=False)["input_ids"]
        parts: list[int] = []
        for ids in rows:
            parts += ids
            if eos_token_id is not None and (not ids or ids[-1] != eos_token_id):
                parts.append(eos_token_id)
        arrays.append(np.array(parts, dtype=np.int32))
    return np.concatenate(arrays)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return digest(vocabulary)


def read_tokens(path: Path) -> Tokens:
    """Read what `save_tokens` wrote."""
    try:
        return np.asarray(np.load(path, allow_pickle=False), dtype=np.int32)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} is damaged ({' '.join(str(error).split()):.200}); delete it") from None


def save_tokens(tokens: Tokens, path: Path) -> None:
    """Write a token array, atomically."""
    content = io.BytesIO()  # written to a file itself, numpy would not say why a write fails
    np.save(content, tokens)
    with replacing(path) as temporary:
        temporary.write_bytes(content.getvalue())
