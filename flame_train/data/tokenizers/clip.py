"""CLIP's byte-pair tokenizer (Radford et al. 2021), as both of SDXL's text encoders use it.

The merges are OpenAI's, shipped beside this file; a diffusers folder's own `vocab.json` and `merges.txt` can
take their place. The two encoders differ only in the id they pad with: CLIP-L with the end token 49407,
OpenCLIP bigG with 0.
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
    """Text to CLIP token ids. Loads its tables at first use, about 0.1 s.

    pad_id: 49407 for CLIP-L, 0 for OpenCLIP bigG. folder: a diffusers `tokenizer` folder with `vocab.json`
    and `merges.txt`, in place of the shipped tables.
    """

    def __init__(self, pad_id: int, folder: Path | None = None) -> None:
        self.pad_id = pad_id
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        """Token ids without begin and end, of any length."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
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
        """SHA-256 of tables and padding: what a cached text embedding depends on besides its model."""
        vocab, merges = self._tables
        digest = hashlib.sha256(f"padding {self.pad_id}, {len(vocab)} tokens\n".encode())
        digest.update("\n".join(sorted(vocab, key=vocab.__getitem__)).encode())
        digest.update("\n".join(map(str, sorted(vocab.values()))).encode())
        digest.update("\n".join(map(" ".join, merges)).encode())
        return digest.hexdigest()

    def _special(self, token: str) -> int:
        found = self._tables[0].get(token)
        if found is None:
            raise ModelFileError(f"{self._folder}: expected a CLIP vocabulary with {token}: fetch the folder again")
        return found

    @cached_property
    def _tables(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        return shipped_tables() if self._folder is None else folder_tables(self._folder)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

        vocab, merges = self._tables
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, end_of_word_suffix="</w>", unk_token=EOS_TOKEN))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in (BOS_TOKEN, EOS_TOKEN)]
        )
        return tokenizer


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
    """Those of a model's text encoders, `pads` being component -> padding token; kept for the next time.

    Of a diffusers folder its own vocabularies, else the published one.
    """
    return _kept_tokenizers(str(base), tuple(pads.items()))


@lru_cache(maxsize=4)
def _kept_tokenizers(base: str, pads: tuple[tuple[str, int], ...]) -> Mapping[str, ClipTokenizer]:
    made = {}
    for component, pad in pads:
        folder = Path(base) / component.replace("text_encoder", "tokenizer")
        made[component] = ClipTokenizer(pad, folder if (folder / "vocab.json").exists() else None)
    return made
