"""Files of every kind that the program reads, damaged at random: each is read, or refused by name, and soon."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from flame_train import cli
from flame_train.config.load import load
from flame_train.config.render import commented
from flame_train.config.schema import Config
from flame_train.data.images import load_image
from flame_train.errors import FlameError, exit_status
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.text_encoders.t5.tokenizer import T5Tokenizer

SLOW = 5.0  # seconds that one file may take
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"0",
    b"\\",
    b"\x00",
    b"\xff",
    b"\x1b[2J",
    b"\\ud800",
    b"e999",
]
VALUE = re.compile(rb'"[^"\\n]{0,200}"|-?[0-9][0-9.e+-]*|true|false|null')
LINE = '\ntouch "$HOME"\n'
"""It must not become a line of a batch script."""
WILD = (
    *("1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "9" * 5000, "0x" + "f" * 5000, "-1", "0.5", "null"),
    *("true", '"x"', "[]", "{}", "[[1]]", "1979-05-27", "[" * 3000, '"\\ud800"', '"\\u001b[2J"', json.dumps(LINE)),
)
"""Values in place of others: no number, none that fits, or of another type."""
MODULE = "lora_unet_output_blocks_8_0_skip_connection"


@dataclass(frozen=True)
class Kind:
    """How a whole file of a kind is made, what it is called, and what reads it."""

    name: str
    make: Callable[[Path], bytes]
    read: Callable[[Path], object]


def attack_of(name: str, kind: Kind) -> Callable[[Path, random.Random, float], tuple[Counter[str], list[str]]]:
    """The attack on files of that kind."""

    def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
        path, outcomes, failures = folder / kind.name, Counter[str](), []
        whole = kind.make(path)
        while time.monotonic() < end:
            path.write_bytes(damaged(whole, rng))
            begin = time.monotonic()
            try:
                kind.read(path)
                outcomes["read"] += 1
            except FlameError as error:
                outcomes[f"refused with {exit_status(error)}"] += 1
                printable = all(line.isprintable() for line in str(error).splitlines())
                if not printable and name not in ("configs", "sweeps"):  # the command shows these escaped
                    failures.append(f"{name}: a message that steers a terminal: {error!r}")
            except BaseException as error:  # also what is no Exception: a library may panic
                if isinstance(error, KeyboardInterrupt):
                    raise
                kept = Path(f"{name}-{len(failures)}-{kind.name}").absolute()
                kept.write_bytes(path.read_bytes())
                failures.append(f"{type(error).__name__}: {error}; the file is {kept}")
            if time.monotonic() - begin > SLOW:
                failures.append(f"{name}: one file took {time.monotonic() - begin:.0f} s")
        return outcomes, failures

    return attack


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """One to four changes: bytes, stretches, tokens and values put in, taken out, repeated, or the end cut off."""
    content = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        near = min(len(content), 2000) if rng.random() < 0.7 else len(content)  # where headers are
        place = rng.randrange(near) if near else 0
        match rng.randrange(8):
            case 0:
                content[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                content[place:place] = rng.choice(TOKENS)
            case 2:
                del content[place : place + rng.randint(1, 16)]
            case 3:
                content[place : place + rng.randint(1, 8)] = rng.choice(TOKENS)
            case 4:
                stretch = content[place : place + rng.randint(1, 200)]
                content[place:place] = stretch * rng.randint(1, 50)
            case 5 | 6 if values := list(VALUE.finditer(content)):
                begin, end = rng.choice(values).span()
                content[begin:end] = rng.choice(WILD).encode()
            case _:
                del content[place + rng.randrange(1 + len(content) - place) :]
    return bytes(content)


def tensors(path: Path) -> bytes:
    """A small safetensors file with metadata."""
    arrays = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "alpha": np.array(4.0, np.float16)}
    save_file(path, arrays, {"ss_v2": "False", "note": "two\nlines"})
    return path.read_bytes()


def lora(path: Path) -> bytes:
    """A LoRA of SDXL with one module."""
    arrays = {
        f"{MODULE}.lora_down.weight": np.ones((2, 64, 1, 1), np.float32),
        f"{MODULE}.lora_up.weight": np.ones((32, 2, 1, 1), np.float32),
        f"{MODULE}.alpha": np.array(2.0, np.float64),
    }
    scales = {"lora_adapter_metadata": json.dumps({"unet.alpha_pattern": {"to_q": 4}, "unet.lora_alpha": 2})}
    save_file(path, arrays, {"ss_base_model_version": "sdxl_base_v1-0", **scales})
    return path.read_bytes()


def image(path: Path) -> bytes:
    """A JPEG: unlike a PNG's, its parts have no checksums."""
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def spiece(path: Path) -> bytes:
    """A SentencePiece model with a table of characters."""
    pieces = [(t, 0.0) for t in ("<pad>", "</s>", "<unk>")] + [("\u2581a", -1.0), ("cat", -2.0), ("\u2581", -3.0)]

    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2, len(payload)]) + payload

    body = b"".join(field(1, field(1, t.encode()) + b"\x15" + struct.pack("<f", score)) for t, score in pieces)
    table = struct.pack("<5I", 16, 0x80000000, 1, 2, 3) + b"a\0"
    return body + field(2, bytes([3 << 3, 1])) + field(3, field(2, table))


def through_the_command(path: Path) -> None:
    """What `inspect` and `convert` make of a file, and print."""
    for line in (
        ["inspect", str(path)],
        ["inspect", str(path), "--json"],
        ["convert", str(path), str(path.with_name("out.safetensors")), "--to", "diffusers", "--force"],
    ):
        command(line, (0, 2, 3, 6, 7))


def command(line: list[str], codes: tuple[int, ...]) -> None:
    """Runs a command line. Raises AssertionError where it ends otherwise, or steers the terminal."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = cli.run(line)
    if code not in codes:
        raise AssertionError(f"{line[0]} ended with {code}: {said.getvalue()}")
    if not all(part.isprintable() for part in said.getvalue().split("\n")):
        raise AssertionError(f"{line[0]} printed what steers a terminal: {said.getvalue()!r}")


def read_tensors(path: Path) -> None:
    """Every tensor."""
    with SafetensorsFile(path) as file:
        for name in file.names:
            file.read(name).tobytes()


KINDS = {
    "headers": Kind("x.safetensors", tensors, read_tensors),
    "configs": Kind("x.yaml", lambda path: yaml().encode(), lambda path: load(str(path))),
    "images": Kind("x.jpg", image, load_image),
    "loras": Kind("l.safetensors", lora, through_the_command),
    "vocabularies": Kind("spiece.model", spiece, lambda path: T5Tokenizer(path).encode("a \uff41 cat")),
}


def yaml() -> str:
    """The commented config, as YAML, with what it must name."""
    lines = []
    for line in commented(Config(), "a config").splitlines():
        if line.startswith("["):
            lines.append(f"{line.strip('[]')}:")
        elif " = " in line:
            key, _, value = line.partition(" = ")
            named = {"checkpoint": '"base.safetensors"', "path": '"images"', "dir": '"run"'}.get(key.strip(), "")
            written = value.replace('""', named, 1) if named else value
            lines.append(f"{'' if key == 'format' else '  '}{key}: {written}")
    return "\n".join(lines) + "\n"
