"""T5's unigram tokenizer (Kudo 2018), as the text encoders of SD3 and Flux use it, and UMT5's, which is Wan's.

The vocabulary of T5 v1.1 comes along; a `spiece.model` or `tokenizer.json` beside the model takes its place. Both give
the tokenizer of transformers. It normalises characters as SentencePiece does, splits words at white space and
begins them with "▁". It cuts each into the likeliest pieces. UMT5's vocabulary of 256,300 pieces lies in a model's
folder, or in ComfyUI's file of its encoder.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flame_train.errors import ModelFileError
from flame_train.text_encoders.encoder import TokenRow
from flame_train.text_encoders.stored_vocabulary import MAX_BYTES, stored_vocabulary

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3  # of a piece
_MODEL_TYPE: Final = 3  # of the trainer
_CHARSMAP: Final = 2  # of the normalizer
_UNIGRAM: Final = 1
_USER_DEFINED: Final = 4

_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Spiece:
    """The content of a model file: pieces with their log probabilities, in the order of their ids."""

    pieces: tuple[tuple[str, float], ...]
    user_defined: tuple[str, ...]  # pieces that are never cut
    charsmap: bytes  # how characters are normalised, in SentencePiece's compiled form; empty for not at all


def parse_spiece(data: bytes) -> Spiece:
    """Returns the unigram model in a `spiece.model` file's bytes. ValueError for anything else."""
    pieces: list[tuple[str, float]] = []
    user_defined: list[str] = []
    charsmap, kind = b"", _UNIGRAM
    for number, value in _fields(data):
        if number == _PIECES:
            text, score, sort = _piece(_bytes(value))
            pieces.append((text, score))
            user_defined += [text] if sort == _USER_DEFINED else []
        elif number == _TRAINER:
            kind = next((v for n, v in _fields(_bytes(value)) if n == _MODEL_TYPE and isinstance(v, int)), kind)
        elif number == _NORMALIZER:
            charsmap = next((_bytes(v) for n, v in _fields(_bytes(value)) if n == _CHARSMAP), charsmap)
    if kind != _UNIGRAM:
        raise ValueError("a SentencePiece model of another kind than unigram")
    if not pieces:
        raise ValueError("no SentencePiece model: it holds no pieces")
    return Spiece(tuple(pieces), tuple(user_defined), charsmap)


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, sort = "", 0.0, 1
    for number, value in _fields(data):
        if number == _TEXT:
            text = _bytes(value).decode("utf-8")
        elif number == _SCORE:
            score = _float(_bytes(value))
        elif number == _TYPE and isinstance(value, int):
            sort = value
    return text, score, sort


def _float(data: bytes) -> float:
    if len(data) != 4:
        raise ValueError(f"no SentencePiece model: {len(data)} bytes where a float was expected")
    number: float = struct.unpack("<f", data)[0]
    return number


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("no SentencePiece model: a number where a message was expected")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yields field number and value of each field of a message: a number for a varint, else bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FOUR_BYTES, _EIGHT_BYTES):
            length = 4 if wire == _FOUR_BYTES else 8
        else:
            raise ValueError(f"no SentencePiece model: wire type {wire} at byte {at}")
        if length > len(data) - at:
            raise ValueError(f"a SentencePiece model that is cut off at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number of seven bits a byte, lowest first, and where the next field begins."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"a SentencePiece model that is cut off at byte {at}")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError(f"no SentencePiece model: a number of over ten bytes at byte {at}")


if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, EOS = 0, 1

_FIRST: Final = ("<pad>", "</s>", "<unk>")
_FIRST_OF_UMT5: Final = ("<pad>", "</s>", "<s>", "<unk>")
_EXTRA_IDS: Final = {_FIRST: 100, _FIRST_OF_UMT5: 300}  # sentinels, which are not among a SentencePiece model's pieces
_FILES: Final = ("tokenizer.json", "spiece.model")
_FOLDERS: Final = ("", "tokenizer_3", "tokenizer_2", "tokenizer")

SHIPPED: Final = Path(__file__).parent / "tokenizer.json.gz"
"""The vocabulary of T5 v1.1, which SD3's and Flux's encoders were trained with; part of the package."""

PUBLISHED_ROWS: Final = 32128
"""The rows of their embedding: the vocabulary's 32,100 pieces, filled up."""
UMT5_ROWS: Final = 256384
"""The rows of UMT5's: 256,300 pieces, filled up."""
_BEGINS: Final = {PUBLISHED_ROWS: _FIRST, UMT5_ROWS: _FIRST_OF_UMT5}
_IN_WEIGHTS: Final = "spiece_model"  # the tensor that ComfyUI's files have


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Pieces with their log probabilities by id, the compiled normalisation, and which texts are never cut."""

    pieces: tuple[tuple[str, float], ...]
    charsmap: bytes
    whole: tuple[str, ...]

    @property
    def first(self) -> tuple[str, ...]:
        """The special pieces with which it begins, of which the last stands for what is unknown."""
        return _first_of(self.pieces)


def cleaned(text: str) -> str:
    """Returns a caption as Wan's pipelines clean it: HTML's entities resolved, white space joined."""
    return " ".join(html.unescape(html.unescape(text)).split())


class T5Tokenizer:
    """Text to T5 token ids. Loads its vocabulary at first use, about 0.1 s.

    path: a `spiece.model`, a `tokenizer.json`, a folder with one of them, or ComfyUI's file of UMT5. Its use raises
    ModelFileError for a file that cannot be read or is no T5 vocabulary.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def encode(self, text: str) -> list[int]:
        """Returns token ids without the end token, of any length."""
        with _damage_told(self.path):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def row(self, text: str, length: int) -> TokenRow:
        """Returns the caption in `length` ids: cut to length - 1 tokens, the end token, padded with 0.

        Published lengths: SD3 77, 154 or 256; Flux dev 512, schnell 256.
        """
        return TokenRow.of(self.encode(text), length, PAD, [EOS])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of vocabulary and normalisation, on which a cached text embedding depends besides its model."""
        vocabulary = self.vocabulary
        digest = hashlib.sha256(json.dumps([vocabulary.pieces, vocabulary.whole]).encode())
        digest.update(vocabulary.charsmap)
        return digest.hexdigest()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return read_vocabulary(self.path)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

        vocabulary = self.vocabulary
        tokenizer = Tokenizer(models.Unigram(list(vocabulary.pieces), len(vocabulary.first) - 1, False))
        if vocabulary.charsmap:
            tokenizer.normalizer = normalizers.Precompiled(vocabulary.charsmap)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")]
        )
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in (*vocabulary.first, *vocabulary.whole)]
        )
        return tokenizer


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    """Raises ModelFileError for the library's errors, which have no class of their own; a panic is no `Exception`."""
    try:
        yield
    except ModelFileError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelFileError(f"{path}: {error}; the file is damaged, fetch it again") from error


def find_vocabulary(places: Iterable[str | Path], option: str, rows: int = 0) -> Path:
    """The vocabulary file in or beside the first of `places` that has one: a checkpoint or a diffusers folder each.

    Where none has one, the shipped vocabulary for an encoder whose embedding has the published `rows`. For UMT5 it
    may be a tensor of the file itself. Raises ModelFileError for any other, with the searched places, the needed file
    and its place; `option` is the name of the setting for its path.
    """
    folders: list[Path] = []
    files = [path for path in map(Path, places) if path.is_file()]
    for place in map(Path, places):
        folder = place if place.is_dir() else place.parent
        folders += [folder / name for name in _FOLDERS if folder / name not in folders]
    for path in (folder / name for folder in folders for name in _FILES):
        if path.is_file() and _is_vocabulary(path, rows):
            return path
    if rows == PUBLISHED_ROWS:
        return SHIPPED
    inside = next((file for file in files if rows == UMT5_ROWS and _in_weights(file)), None)
    if inside is not None:
        return inside
    looked = ", ".join(str(folder.absolute()) for folder in folders if folder.is_dir()) or "no folder that exists"
    if rows == UMT5_ROWS:
        raise ModelFileError(
            f"UMT5's vocabulary: expected its tokenizer.json or spiece.model, found none in {looked}, nor a tensor "
            f"{_IN_WEIGHTS} in the encoder's file. The file is in tokenizer/ of Wan's diffusers folder, the tensor in "
            f"ComfyUI's umt5_xxl files; put it into the checkpoint's folder, or name its path in {option}"
        )
    raise ModelFileError(
        f"T5's vocabulary: expected a spiece.model, or a tokenizer.json of T5, found none in {looked}. The file is in "
        "tokenizer_3/ of SD3's and tokenizer_2/ of Flux's diffusers folder, and published with google/t5-v1_1-xxl; "
        f"put it into the checkpoint's folder, or name its path in {option}"
    )


def named_vocabulary(place: Path, option: str, rows: int) -> Path:
    """Returns the vocabulary that a user named by its file, whatever it is called, or by its folder.

    Raises ModelFileError, also for that of another encoder than the one whose embedding has so many rows.
    """
    found = find_vocabulary([place], option) if os.path.isdir(place) else place  # False where that cannot be told
    first = read_vocabulary(found).first  # raises for a damaged file before anything uses it
    if _BEGINS.get(rows, first) != first:
        wanted, other = ("UMT5", "T5") if rows == UMT5_ROWS else ("T5", "UMT5")
        raise ModelFileError(f"{found}: expected {wanted}'s vocabulary, and it is {other}'s; name another in {option}")
    return found


def read_vocabulary(path: Path) -> Vocabulary:
    """Returns the vocabulary in a `spiece.model`, a `tokenizer.json`, a folder with one of them, or a file of weights.

    Raises ModelFileError.
    """
    if os.path.isdir(path):
        path = next((path / name for name in _FILES if (path / name).is_file()), path / "spiece.model")
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no plain file")
        state = path.stat()
        vocabulary = _read(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise ModelFileError(
            f"{path}: cannot be read ({error.strerror or error}); expected T5's spiece.model or tokenizer.json"
        ) from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ModelFileError(f"{path}: not T5's vocabulary ({error}); fetch spiece.model again") from error
    return vocabulary


@lru_cache(maxsize=2)
def _read(path: Path, changed: int, size: int) -> Vocabulary:
    """Reads a file once, of which UMT5's takes seconds, unless it has `changed`, or its size has."""
    if path.suffix == ".safetensors":
        return _from_spiece(_in_weights(path) or b"")
    if size > MAX_BYTES:
        raise ValueError(f"over {MAX_BYTES} bytes, too large for a vocabulary")
    data = gzip.decompress(path.read_bytes()) if path == SHIPPED else path.read_bytes()
    return _from_json(json.loads(data)) if data[:1] == b"{" else _from_spiece(data)


def _in_weights(path: Path) -> bytes | None:
    return stored_vocabulary(path, _IN_WEIGHTS, "UMT5's spiece.model")


def _is_vocabulary(path: Path, rows: int) -> bool:
    """Tells it from CLIP, whose folders hold a tokenizer.json too, and for published `rows` T5's from UMT5's."""
    try:
        first = read_vocabulary(path).first
    except ModelFileError:
        return False
    return _BEGINS.get(rows, first) == first


def _from_spiece(data: bytes) -> Vocabulary:
    spiece = parse_spiece(data)
    first = _first_of(spiece.pieces)
    sentinels = tuple(f"<extra_id_{i}>" for i in reversed(range(_EXTRA_IDS[first])))
    pieces = (*spiece.pieces, *((sentinel, 0.0) for sentinel in sentinels))
    return _checked(pieces, spiece.charsmap, (*spiece.user_defined, *sentinels))


def _from_json(content: Any) -> Vocabulary:
    model = content["model"]
    if model.get("type") != "Unigram":
        raise ValueError(f"it holds a model of type {model.get('type')}, not Unigram")
    pieces = tuple((str(text), float(score)) for text, score in model["vocab"])
    sentinels = tuple(text for text, _ in pieces if text.startswith("<extra_id_"))
    normalizer = content.get("normalizer") or {}
    parts = normalizer.get("normalizers", [normalizer])
    compiled = next((part["precompiled_charsmap"] for part in parts if part.get("type") == "Precompiled"), "")
    return _checked(pieces, base64.b64decode(compiled, validate=True), sentinels)


def _checked(pieces: Sequence[tuple[str, float]], charsmap: bytes, whole: Sequence[str]) -> Vocabulary:
    _first_of(pieces)
    if not all(math.isfinite(score) for _, score in pieces):
        raise ValueError("a piece's score is not a finite number")
    return Vocabulary(tuple(pieces), charsmap, tuple(whole))


def _first_of(pieces: Sequence[tuple[str, float]]) -> tuple[str, ...]:
    """Returns the special pieces with which a vocabulary begins: T5's or UMT5's. ValueError for others."""
    begins = (_FIRST, _FIRST_OF_UMT5)
    own = next((first for first in begins if tuple(text for text, _ in pieces[: len(first)]) == first), None)
    if own is None:
        found = (repr(text) for text, _ in pieces[: len(_FIRST)])
        raise ValueError(f"its first pieces are {', '.join(found)}, not {', '.join(map(repr, _FIRST))}")
    return own
