"""Tekken's vocabulary as Mistral publishes it: a `tekken.json` beside the encoder, or its bytes in ComfyUI's files."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flame_train.errors import ModelFileError
from flame_train.io.json_values import json_tree, rows, table, whole
from flame_train.text_encoders.mistral.tokenizer import (
    BYTES,
    NAMED,
    SPECIAL_ROWS,
    WORD,
    TekkenTokenizer,
    made,
    published_tokens,
)
from flame_train.text_encoders.qwen3.tokenizer import beside, bytes_of, tokenizer_file
from flame_train.text_encoders.stored_vocabulary import stored_vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PUBLISHED_ROWS: Final = 131072
"""The rows of the embedding: the special tokens', and one a rank."""
TENSOR: Final = "tekken_model"
"""The bytes of a `tekken.json` in ComfyUI's files."""


class _OfFile(TekkenTokenizer):
    """The tokenizer of a `tekken.json`, of which `raw` are the bytes."""

    def __init__(self, raw: bytes, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._raw, self._read = raw, tokenizer

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self._raw).hexdigest()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._read


def tekken_of(raw: bytes, origin: str) -> TekkenTokenizer:
    """Returns the tokenizer of a `tekken.json`: the published one where it is that, so that caches stay as they are.

    Raises ModelFileError for a damaged one, and names its `origin`.
    """
    try:
        parts = _parts(raw)
        if parts == (published_tokens(), NAMED, SPECIAL_ROWS, WORD):
            return TekkenTokenizer()
        return _OfFile(raw, made(*parts))
    except Exception as error:  # the library has no error class for a pattern
        raise ModelFileError(f"{origin}: not a tekken.json of Mistral ({error}); get another copy") from error


def find_tekken(encoder: Path, places: Sequence[Path], size: int) -> TekkenTokenizer:
    """Returns the tokenizer that the encoder's file holds, or else the one of a `tekken.json` in or beside `places`.

    Without both it is the published one, or for an embedding of other rows that of a `tokenizer.json` there. Raises
    ModelFileError: there is none, it is damaged, or has more tokens than the embedding has rows.

    Args:
        encoder: file or folder of the encoder.
        places: checkpoints or folders.
        size: the rows of its embedding.
    """
    origin, tokenizer = _found(encoder, places, size)
    if tokenizer.rows > size:
        raise ModelFileError(
            f"{origin}: has {tokenizer.rows} tokens, more than the {size} rows of the encoder's embedding; it is of "
            "another model, fetch the encoder's own"
        )
    return tokenizer


def _found(encoder: Path, places: Sequence[Path], size: int) -> tuple[str, TekkenTokenizer]:
    """Returns a tokenizer, and where it was found."""
    if (raw := stored_vocabulary(encoder, TENSOR, "a tekken.json")) is not None:
        return f"{encoder}: {TENSOR}", tekken_of(raw, f"{encoder}: {TENSOR}")
    if (file := next(beside(places, "tekken.json"), None)) is not None:
        return str(file), tekken_of(bytes_of(file), str(file))
    if size == PUBLISHED_ROWS:
        return "the published vocabulary", TekkenTokenizer()
    if (file := tokenizer_file(places)) is not None:
        return str(file), TekkenTokenizer(file)
    raise ModelFileError(
        f"Mistral's vocabulary: expected a tekken.json or tokenizer.json beside an encoder of {size} rows, which has "
        f"not the {PUBLISHED_ROWS} of the published vocabulary; put it into the folder of the checkpoint or of "
        "text_encoders.mistral"
    )


def _parts(raw: bytes) -> tuple[Sequence[bytes], Mapping[str, int], int, str]:
    """Returns what `made` takes. Raises ValueError that says what is damaged."""
    tree = table(json_tree(raw))
    config, entries = table(tree.get("config")), rows(tree.get("vocab"))
    pattern, special = config.get("pattern"), whole(config.get("default_num_special_tokens"))
    size = whole(config.get("default_vocab_size"))
    if not isinstance(pattern, str) or special is None or size is None:
        raise ValueError("it has no config with pattern, default_vocab_size and default_num_special_tokens")
    if not BYTES <= size - special <= len(entries):
        raise ValueError(f"it has {len(entries)} tokens, and its config says {size - special}")
    tokens = [_token(entry, rank) for rank, entry in enumerate(entries[: size - special])]
    if len(set(tokens)) < len(tokens) or {bytes([byte]) for byte in range(BYTES)} != set(tokens[:BYTES]):
        raise ValueError("a token is there twice, or its first tokens are not the bytes")
    return tokens, _named(tree.get("special_tokens"), special), special, pattern


def _token(entry: Mapping[str, Any], rank: int) -> bytes:
    stored = entry.get("token_bytes")
    token = base64.b64decode(stored, validate=True) if isinstance(stored, str) else b""
    if not token or entry.get("rank") != rank:
        raise ValueError(f"expected token_bytes of rank {rank} at its place")
    return token


def _named(stored: Any, special: int) -> Mapping[str, int]:
    """Returns the ids of the special tokens of a message, which old versions of the file do not state."""
    found = (
        dict(NAMED) if stored is None else {str(row.get("token_str")): whole(row.get("rank")) for row in rows(stored)}
    )
    named = {name: number for name in NAMED if (number := found.get(name)) is not None and number < special}
    if len(set(named.values())) < len(NAMED):
        lost = [name for name in NAMED if name not in named]
        raise ValueError(f"it has no place of its own for {', '.join(lost) or 'each special token'}")
    return named
