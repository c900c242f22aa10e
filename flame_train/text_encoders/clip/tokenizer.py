"""CLIP's byte-pair tokenizer (Radford et al. 2021), as both of SDXL's text encoders use it.

OpenAI's `tokenizer.json` is part of the package; a diffusers folder's `vocab.json` and `merges.txt` replace its tables.
The two encoders differ only in the id they pad with: CLIP-L with the end token 49407, OpenCLIP bigG with 0.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from flame_train.errors import ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED: Final = Path(__file__).parent / "tokenizer.json.gz"
BOS_TOKEN, EOS_TOKEN = "<|startoftext|>", "<|endoftext|>"
CHUNK = 75  # caption tokens in one window of the text encoder
WINDOW = CHUNK + 2  # with the begin and end tokens


@dataclass(frozen=True, slots=True)
class Chunks:
    """A caption cut into windows."""

    ids: np.ndarray[Any, Any]  # int32 (n, 77): begin, up to 75 tokens, end, padding
    tokens: int  # of the whole caption, without begin and end
    truncated: int  # of those, how many did not fit


class ClipTokenizer:
    """Text to CLIP token ids. Loads its vocabulary at first use, about 0.3 s; tokenizers of one folder share it.

    pad_id: 49407 for CLIP-L, 0 for OpenCLIP bigG. folder: a diffusers `tokenizer` folder with `vocab.json`
    and `merges.txt`, in place of the shipped tables.
    """

    def __init__(self, pad_id: int, folder: Path | None = None) -> None:
        self.pad_id = pad_id
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Returns token ids without begin and end, of any length."""
        ids: list[int] = _tokenizer(self._folder).encode(text, add_special_tokens=False).ids
        return ids

    def chunks(self, text: str, max_chunks: int = 1, at_least: int = 1) -> Chunks:
        """Returns the caption in windows of 75 tokens, at most `max_chunks` of them.

        `at_least` adds windows without text, so that captions of different length can share a batch. An empty
        caption is one window of begin, end and padding.
        """
        if not 1 <= at_least <= max_chunks:
            raise ValueError(f"expected 1 <= at_least <= max_chunks, got {at_least} and {max_chunks}")
        ids = self.encode(text)
        fitting = ids[: CHUNK * max_chunks]
        rows = max(at_least, -(-len(fitting) // CHUNK))
        table = np.full((rows, WINDOW), self.pad_id, dtype=np.int32)
        for row in range(rows):
            window = [self.bos_id, *fitting[row * CHUNK : (row + 1) * CHUNK], self.eos_id]
            table[row, : len(window)] = window
        return Chunks(table, len(ids), len(ids) - len(fitting))

    @property
    def bos_id(self) -> int:
        return self._model["vocab"][BOS_TOKEN]

    @property
    def eos_id(self) -> int:
        return self._model["vocab"][EOS_TOKEN]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of tables and padding, on which a cached text embedding depends besides its model."""
        return _fingerprint(self._folder, self.pad_id)

    @property
    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = _content(self._folder)["model"]
        return model


@lru_cache(maxsize=4)
def _tokenizer(folder: Path | None) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(_content(folder)))
    except Exception as error:  # the library has no error class
        raise ModelFileError(f"{folder}: vocab.json and merges.txt do not fit ({error}): fetch them again") from error


@lru_cache(maxsize=8)
def _fingerprint(folder: Path | None, pad_id: int) -> str:
    model = _content(folder)["model"]
    vocab = model["vocab"]
    parts = (sorted(vocab, key=vocab.__getitem__), map(str, sorted(vocab.values())), model["merges"])
    content = f"padding {pad_id}, {len(vocab)} tokens\n" + "".join("\n".join(part) for part in parts)
    return hashlib.sha256(content.encode()).hexdigest()


@lru_cache(maxsize=4)
def _content(folder: Path | None) -> dict[str, Any]:
    """Returns the `tokenizer.json`, whose tables are those of `folder`, if there is one. Raises ModelFileError."""
    content: dict[str, Any] = json.loads(gzip.decompress(SHIPPED.read_bytes()))
    if folder is None:
        return content
    try:
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        merges = (folder / "merges.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{folder}: expected a tokenizer folder with vocab.json and merges.txt ({error}): fetch it again"
        ) from error
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise ModelFileError(f"{folder / 'vocab.json'}: expected an object of token to id: fetch it again")
    merges = merges[merges[0].startswith("#version") :]
    if not all(line.count(" ") == 1 for line in merges):
        raise ModelFileError(f"{folder / 'merges.txt'}: expected two symbols a line: fetch it again")
    content["model"] |= {"vocab": vocab, "merges": merges}
    for token in content["added_tokens"]:
        if token["content"] not in vocab:
            raise ModelFileError(
                f"{folder}: expected a CLIP vocabulary with {token['content']}: fetch the folder again"
            )
        token["id"] = vocab[token["content"]]
    return content
