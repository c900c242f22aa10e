"""CLIP's byte-pair tokenizer (Radford et al. 2021), as both of SDXL's text encoders use it.

The merges are OpenAI's and part of the package; a diffusers folder's `vocab.json` and `merges.txt` can replace them.
The two encoders differ only in the id they pad with: CLIP-L with the end token 49407, OpenCLIP bigG with 0.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flame_train.errors import ModelFileError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS_TOKEN, EOS_TOKEN = "<|startoftext|>", "<|endoftext|>"
CHUNK = 75  # caption tokens in one window of the text encoder
WINDOW = CHUNK + 2  # with the begin and end tokens

# Words, single digits, runs of other signs, English contractions; white space separates and is dropped.
_SPLIT = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


@dataclass(frozen=True, slots=True)
class Chunks:
    """A caption cut into windows."""

    ids: np.ndarray[Any, Any]  # int32 (n, 77): begin, up to 75 tokens, end, padding
    tokens: int  # of the whole caption, without begin and end
    truncated: int  # of those, how many did not fit


class ClipTokenizer:
    """Text to CLIP token ids. Loads its vocabulary at first use, about 0.2 s; tokenizers of one folder share it.

    pad_id: 49407 for CLIP-L, 0 for OpenCLIP bigG. folder: a diffusers `tokenizer` folder with `vocab.json`
    and `merges.txt`, in place of the shipped tables.
    """

    def __init__(self, pad_id: int, folder: Path | None = None) -> None:
        self.pad_id = pad_id
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Token ids without begin and end, of any length."""
        ids: list[int] = self._vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def chunks(self, text: str, max_chunks: int = 1, at_least: int = 1) -> Chunks:
        """The caption in windows of 75 tokens, at most `max_chunks` of them.

        `at_least` adds windows without text, so that captions of different length can share a batch. An empty
        caption is one window of begin, end and padding.
        """
        if not 1 <= at_least <= max_chunks:
            raise ValueError(f"expected 1 <= at_least <= max_chunks, got {at_least} and {max_chunks}")
        ids = self.encode(text)
        kept = ids[: CHUNK * max_chunks]
        rows = max(at_least, -(-len(kept) // CHUNK))
        table = np.full((rows, WINDOW), self.pad_id, dtype=np.int32)
        for row in range(rows):
            window = [self.bos_id, *kept[row * CHUNK : (row + 1) * CHUNK], self.eos_id]
            table[row, : len(window)] = window
        return Chunks(table, len(ids), len(ids) - len(kept))

    @cached_property
    def bos_id(self) -> int:
        return self._special(BOS_TOKEN)

    @cached_property
    def eos_id(self) -> int:
        return self._special(EOS_TOKEN)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tables and padding, on which a cached text embedding depends besides its model."""
        own = f"padding {self.pad_id}, {len(self._vocabulary.ids)} tokens\n".encode()
        return hashlib.sha256(own + self._vocabulary.content).hexdigest()

    def _special(self, token: str) -> int:
        found = self._vocabulary.ids.get(token)
        if found is None:
            raise ModelFileError(f"{self._folder}: expected a CLIP vocabulary with {token}: fetch the folder again")
        return found

    @property
    def _vocabulary(self) -> _Vocabulary:
        return _vocabulary(self._folder)


class _Vocabulary:
    """The common part of one folder's tokenizers: `ids` by token, the merges, and the `tokenizers` object."""

    def __init__(self, folder: Path | None) -> None:
        self.ids, self._merges = shipped_tables() if folder is None else folder_tables(folder)

    @cached_property
    def content(self) -> bytes:
        """Everything in it, one item a line."""
        tokens = sorted(self.ids, key=self.ids.__getitem__)
        parts = (tokens, map(str, sorted(self.ids.values())), map(" ".join, self._merges))
        return "".join("\n".join(part) for part in parts).encode()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

        made = Tokenizer(
            models.BPE(vocab=self.ids, merges=self._merges, end_of_word_suffix="</w>", unk_token=EOS_TOKEN)
        )
        made.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS_TOKEN, EOS_TOKEN)])
        return made


@lru_cache(maxsize=4)
def _vocabulary(folder: Path | None) -> _Vocabulary:
    return _Vocabulary(folder)


def shipped_tables() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) from OpenAI's merges: 256 bytes, 256 bytes that end a word, a token a merge, two
    special tokens; 49,408 in all."""
    packed = resources.files(__package__).joinpath("clip_merges.txt.gz").read_bytes()
    merges = _parse_merges(gzip.decompress(packed).decode("utf-8"), "clip_merges.txt.gz")
    letters = _byte_letters()
    tokens = [*letters, *(letter + "</w>" for letter in letters), *(a + b for a, b in merges)]
    return {token: i for i, token in enumerate([*tokens, BOS_TOKEN, EOS_TOKEN])}, merges


def folder_tables(folder: Path) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) from a folder's `vocab.json` and `merges.txt`. Raises ModelFileError."""
    try:
        vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
        text = (folder / "merges.txt").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFileError(
            f"{folder}: expected a tokenizer folder with vocab.json and merges.txt ({error}): fetch it again"
        ) from error
    if not isinstance(vocab, dict) or not all(isinstance(i, int) for i in vocab.values()):
        raise ModelFileError(f"{folder / 'vocab.json'}: expected an object of token to id: fetch it again")
    return vocab, _parse_merges(text, str(folder / "merges.txt"))


def _parse_merges(text: str, name: str) -> list[tuple[str, str]]:
    lines = text.removesuffix("\n").split("\n")
    merges = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :]]
    if not all(len(pair) == 2 for pair in merges):
        raise ModelFileError(f"{name}: expected two symbols a line: fetch it again")
    return [(a, b) for a, b in merges]


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte, in the order of CLIP's first 256 ids (as in GPT-2)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def clip_tokenizers(base: Path, pads: Mapping[str, int]) -> Mapping[str, ClipTokenizer]:
    """Those of a model's text encoders, `pads` being component -> padding token.

    Of a diffusers folder its own vocabularies, else the published one.
    """
    made = {}
    for component, pad in pads.items():
        folder = base / component.replace("text_encoder", "tokenizer")
        made[component] = ClipTokenizer(pad, folder if (folder / "vocab.json").exists() else None)
    return made
