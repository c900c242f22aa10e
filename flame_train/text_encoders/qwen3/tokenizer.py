"""Qwen's byte-level BPE (Sennrich et al. 2016, Radford et al. 2019), as Qwen3's text encoders use it.

Its merges come along, from which the vocabulary follows: the 256 bytes, then one token a merge. A `tokenizer.json`
beside the model takes its place. Both give the token ids of transformers.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from flame_train.errors import ModelFileError
from flame_train.text_encoders.encoder import TokenRow
from flame_train.text_encoders.stored_vocabulary import MAX_BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD_TOKEN: Final = "<|endoftext|>"
SHIPPED: Final = Path(__file__).parent / "qwen_merges.txt.gz"
"""The merges of Qwen2 and Qwen3; part of the package."""

PUBLISHED_ROWS: Final = 151936
"""The rows of Qwen3's embedding: the vocabulary's 151,669 tokens, filled up."""
_FILLED_UP: Final = (PUBLISHED_ROWS, 152064)  # to which Qwen3's embedding is, and Qwen2.5-VL-7B's

_SPECIAL: Final = (
    *(PAD_TOKEN, "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""What is never cut, in the order of ids; they follow the vocabulary's last merge."""
_WORD: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FOLDERS: Final = ("tokenizer", "processor", "")


class BytePairs(ABC):
    """Text to the token ids of a byte-level BPE. Loads its vocabulary at first use, in about a second.

    path: a `tokenizer.json`; None: the published vocabulary. Its use raises ModelFileError for a file that cannot be
    read, or is no byte-level BPE.
    """

    owner: ClassVar[str]
    """Whose it is, in messages."""
    pad_token: ClassVar[str]
    shipped: ClassVar[Path]
    """The published vocabulary; part of the package."""

    @staticmethod
    @abstractmethod
    def published() -> Tokenizer:
        """Returns that of the published vocabulary."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def encode(self, text: str) -> list[int]:
        """Returns token ids, of any length. Special tokens in the text are themselves, as in transformers."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, text: str, length: int) -> TokenRow:
        """Returns the text in `length` ids: cut, or filled up with the padding token.

        Raises ValueError for no length.
        """
        return TokenRow.of(self.encode(text), length, self.pad)

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        token = self._tokenizer.token_to_id(self.pad_token)
        assert token is not None
        return token

    @property
    def rows(self) -> int:
        """How many ids there are: an embedding has this many rows or more."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary's file, on which a cached text embedding depends besides its model."""
        return hashlib.sha256(bytes_of(self.path or self.shipped)).hexdigest()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self.published() if self.path is None else _read(self.path, self.owner, self.pad_token)


class QwenTokenizer(BytePairs):
    """Text to Qwen's token ids."""

    owner = "Qwen"
    pad_token = PAD_TOKEN
    shipped = SHIPPED

    @staticmethod
    def published() -> Tokenizer:
        return _published()


def tokenizer_file(places: Iterable[Path]) -> Path | None:
    """Returns the `tokenizer.json` in or beside the first of `places` that has one; each is a checkpoint or folder."""
    return next((path for path in beside(places, "tokenizer.json") if _is_bpe(path)), None)


def beside(places: Iterable[Path], file: str) -> Iterator[Path]:
    """Yields the files of a name in or beside `places`, in their order."""
    folders = (place if place.is_dir() else place.parent for place in places)
    yield from (path for folder in folders for name in _FOLDERS if (path := folder / name / file).is_file())


def find_tokenizer(places: Iterable[Path], option: str, rows: int) -> Path | None:
    """Returns `tokenizer_file`; None, the published vocabulary, for an encoder whose embedding has its `rows`.

    Raises ModelFileError for any other; `option` is the setting that names the encoder.
    """
    file = tokenizer_file(places)
    if file is None and rows not in _FILLED_UP:
        raise ModelFileError(
            f"Qwen3's vocabulary: expected a tokenizer.json beside an encoder of {rows} rows, which has not the "
            f"{PUBLISHED_ROWS} of the published vocabulary; put it into the folder of the checkpoint or of {option}"
        )
    return file


@lru_cache(maxsize=1)
def _published() -> Tokenizer:
    lines = gzip.decompress(SHIPPED.read_bytes()).decode().split("\n")[1:]  # the first names the version
    return _made([(first, second) for first, _, second in (line.partition(" ") for line in lines if line)])


def bytes_alone() -> str:
    """Returns a `tokenizer.json` without merges: a token a byte, and the special ones. For small models."""
    return str(_made([]).to_str())


def _made(merges: list[tuple[str, str]]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # of the bytes, in the order of ids
    tokens = [*letters, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_WORD), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return tokenizer


def _read(path: Path, owner: str, pad_token: str) -> Tokenizer:
    from tokenizers import Tokenizer

    raw = bytes_of(path)
    try:
        kind = json.loads(raw)["model"]["type"]
        if kind != "BPE":
            raise ValueError(f"it holds a model of type {kind}, not BPE")
        tokenizer = Tokenizer.from_str(raw.decode())
        if tokenizer.token_to_id(pad_token) is None:
            raise ValueError(f"it has no token {pad_token}")
    except Exception as error:  # the library has no error class
        raise ModelFileError(f"{path}: not {owner}'s tokenizer.json ({error}); fetch it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def bytes_of(path: Path) -> bytes:
    """Returns the bytes of a vocabulary's file. Raises ModelFileError for one too large, or not to be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelFileError(f"{path}: is over {MAX_BYTES} bytes, too large for a vocabulary")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror or error})") from error


def _is_bpe(path: Path) -> bool:
    """Tells it from T5 and CLIP, which have a tokenizer.json too."""
    try:
        return bool(json.loads(bytes_of(path))["model"]["type"] == "BPE")
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
