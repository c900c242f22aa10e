"""Tekken, the byte-level BPE of Mistral's models since 2024.

Its tokens come along by rank, from which the merges follow. Both give the token ids of mistral-common.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flame_train.text_encoders.qwen3.tokenizer import BytePairs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES: Final = 256
"""The first ranks, which are of single bytes."""
SPECIAL_ROWS: Final = 1000
"""The first ids of the published vocabulary, which are of special tokens."""
NAMED: Final = {
    **{"<unk>": 0, "<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4, "[IMG]": 10, "<pad>": 11},
    **{"[SYSTEM_PROMPT]": 17, "[/SYSTEM_PROMPT]": 18},
}
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE: Final = r"[^\r\n\p{L}\p{N}]?"
WORD: Final = (
    rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+|{_BEFORE}[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of a word in the published vocabulary."""


class TekkenTokenizer(BytePairs):
    """Text to Tekken's token ids."""

    owner = "Mistral"
    pad_token = "<pad>"
    shipped = Path(__file__).parent / "tekken_tokens.txt.gz"

    @staticmethod
    def published() -> Tokenizer:
        return _published()


def bytes_alone() -> str:
    """Returns a `tokenizer.json` without merges: the special tokens, and one a byte. For small models."""
    return str(made([bytes([byte]) for byte in range(BYTES)]).to_str())


@lru_cache(maxsize=1)
def _published() -> Tokenizer:
    return made(published_tokens())


def published_tokens() -> Sequence[bytes]:
    """Returns the published tokens by rank."""
    lines = gzip.decompress(TekkenTokenizer.shipped.read_bytes()).split()
    return [base64.b64decode(line) for line in lines]


def made(
    tokens: Sequence[bytes], named: Mapping[str, int] = NAMED, special: int = SPECIAL_ROWS, pattern: str = WORD
) -> Tokenizer:
    """Returns the tokenizer of a vocabulary.

    Args:
        tokens: by rank; the first are the bytes.
        named: the ids of special tokens that are never cut.
        special: how many ids come before that of the first rank.
        pattern: of a word, beyond which no token reaches.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    names = {number: name for name, number in named.items()}
    unnamed = {names.get(number, f"<SPECIAL_{number}>"): number for number in range(special)}
    spelled = [_spelled(token) for token in tokens]
    vocabulary = unnamed | {name: special + rank for rank, name in enumerate(spelled)}
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(spelled)))
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in named])
    return tokenizer


def _merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Returns for each token every pair of tokens that makes it, by rank: of the token, of the left, of the right."""
    ranks, merges = {token: rank for rank, token in enumerate(tokens)}, list[tuple[str, str]]()
    for token in tokens[BYTES:]:
        lefts = ((ranks.get(token[:i]), i) for i in range(1, len(token)))
        pairs = [
            (left, right, i) for left, i in lefts if left is not None and (right := ranks.get(token[i:])) is not None
        ]
        merges += [(token[:i], token[i:]) for _, _, i in sorted(pairs)]
    return merges


def _letters() -> list[str]:
    """Returns the character for each byte, as GPT-2 has it: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTES)]


_LETTERS: Final = _letters()


def _spelled(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)
