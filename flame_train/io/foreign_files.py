"""Identifies a file that is not safetensors, for a message with a remedy. Nothing is unpickled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

HOW_TO_CONVERT: Final = (
    "It can run code when it is opened, so flame-train never does. Convert it once where PyTorch is "
    "installed, if you trust its source: load it with torch.load(file, weights_only=True) and "
    "write the tensors with safetensors.torch.save_file"
)
PICKLE_SUFFIXES: Final = frozenset({".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle"})

GGUF_MAGIC: Final = b"GGUF"

_COMMENTS: Final = re.compile(rb"(?:[ \t]*(?:#[^\n]*)?\r?\n)*")
_TABLE: Final = re.compile(rb"\[{1,2}[A-Za-z][\w.-]*\]{1,2}[ \t]*(?:#[^\n]*)?\r?\n\s*[^\s\[{\"]")
_DOWNLOAD_AGAIN: Final = "Download the file itself again"
_SIGNATURES: Final[tuple[tuple[bytes, str], ...]] = (
    (GGUF_MAGIC, "It is a GGUF file, which is read where a base model is expected, and not here"),
    (b"\x1f\x8b", "It is gzip-compressed; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "It is a 7z archive; unpack it first"),
    (b"Rar!", "It is a RAR archive; unpack it first"),
    (b"\x89HDF", "It is an HDF5 file, which is not supported; get the safetensors version of the model"),
    (b"\x93NUMPY", "It is a NumPy array file, not a model"),
    (b"\x89PNG", "It is a PNG image, not a model"),
    (b"\xff\xd8\xff", "It is a JPEG image, not a model"),
)


def refused_by_suffix(path: Path) -> str | None:
    """Returns a reason when the name alone says that the file is a pickle, else None."""
    if path.suffix.lower() in PICKLE_SUFFIXES:
        return f"A {path.suffix} file is a Python pickle. {HOW_TO_CONVERT}"
    return None


def describe_foreign(head: bytes, size: int) -> str | None:
    """Returns the kind of a file of `size` bytes beginning with `head`, with the remedy; None if unknown."""
    if size == 0:
        return f"It is empty (0 bytes). {_DOWNLOAD_AGAIN}"
    if head.startswith(b"version https://git-lfs"):
        return (
            f"It is a Git LFS pointer of {size} bytes, not the model: the large file was never fetched. "
            "Run `git lfs pull` in its repository, or download the file itself"
        )
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return f"It is a web page ({size} bytes), not the model; often a login or error page. {_DOWNLOAD_AGAIN}"
    if head.startswith(b"PK\x03\x04"):
        return f"It is a zip archive, most likely a PyTorch checkpoint (a pickle). {HOW_TO_CONVERT}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"It is a Python pickle, most likely an old PyTorch checkpoint. {HOW_TO_CONVERT}"
    for signature, words in _SIGNATURES:
        if head.startswith(signature):
            return words
    comments = _COMMENTS.match(head)
    if _TABLE.match(head, comments.end() if comments else 0):
        return "It is a TOML text, such as a config, not a model; name the .safetensors file"
    if text.startswith((b"{", b"[")):
        return f"It is a JSON text of {size} bytes, often a server's error message. {_DOWNLOAD_AGAIN}"
    return None
