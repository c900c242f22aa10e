"""LoRA files whose names and patterns were made to be slow to match: each is refused by name, or read, in a second."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
from files import MODULE, through_the_command

from flame_train.io.header import MAX_NAME
from flame_train.io.safetensors import save_file

LONGEST = 1.0  # seconds of processor time that `inspect` and `convert` may take together, besides a plain one
PIECES = """
lora_ lora_down lora_up .weight .alpha lora_unet_ lora_te1_ blocks_ blocks. layers_1_ 1 _ .
down_blocks_0_attentions_0_ transformer_blocks_0_attn1_to_q output_blocks_8_0_ a
""".split()
PATTERNS = r"""
(a+)+ (.*)* .*.*.*.* (a|a)*b (x{1,99}){1,99} ((((a)))) [a-z]*[a-z]*[a-z]* \w+\w+\w+
""".split()


def attack(folder: Path, rng: random.Random, end: float) -> tuple[Counter[str], list[str]]:
    """Files until `end` on the clock. Returns how often what happened, and what did not hold."""
    path, outcomes, failures = folder / "l.safetensors", Counter[str](), []
    write(path, {}, "")
    usual = max(seconds(path, failures) for _ in range(2))  # what is made once is made by the first
    while time.monotonic() < end:
        kind = rng.choice(["long names", "many names", "names nearly right", "patterns"])
        names = {"long names": long, "many names": many, "names nearly right": near}.get(kind, lambda _: [])(rng)
        pattern = rng.choice(PATTERNS) * rng.randint(1, 30) if kind == "patterns" else ""
        write(path, dict.fromkeys(names, np.ones(1, np.float32)), pattern)
        outcomes[kind] += 1
        taken = seconds(path, failures) - usual
        if taken > LONGEST:
            kept = Path(f"names-{len(failures)}.safetensors").absolute()
            kept.write_bytes(path.read_bytes())
            failures.append(f"{kind}: took {taken:.1f} s of the processor; the file is {kept}")
    return outcomes, failures


def long(rng: random.Random) -> list[str]:
    """Names as long as one may be, and longer."""
    pieces = rng.choices(PIECES, k=rng.randint(1, 3))
    return ["".join(pieces) * 2000 + str(i) for i in range(2)] + [
        ("".join(pieces) * MAX_NAME)[: MAX_NAME - 20] + f"{i}.lora_down.weight" for i in range(rng.choice([1, 100]))
    ][rng.randrange(2) :]


def many(rng: random.Random) -> list[str]:
    """Tens of thousands of names that nobody knows."""
    stem = "".join(rng.choices(PIECES, k=rng.randint(1, 6)))
    return [f"{stem}{i}.lora_down.weight" for i in range(rng.choice([1000, 20_000]))]


def near(rng: random.Random) -> list[str]:
    """Known names with a letter changed, so that their neighbours are looked for."""
    names = []
    for i in range(rng.choice([5, 500])):
        letters = list(MODULE * rng.choice([1, 4]))
        letters[rng.randrange(10, len(letters))] = rng.choice("abc_.1")
        names.append("".join(letters) + f"{i}.lora_up.weight")
    return names


def write(path: Path, more: dict[str, np.ndarray], pattern: str) -> None:
    """A LoRA of SDXL, with these tensors or this pattern besides."""
    arrays = {
        f"{MODULE}.lora_down.weight": np.ones((2, 64, 1, 1), np.float32),
        f"{MODULE}.lora_up.weight": np.ones((32, 2, 1, 1), np.float32),
    }
    said = {"unet.alpha_pattern": {pattern: 4, f"x{pattern}": 5}, "unet.lora_alpha": 2}
    metadata = {"lora_adapter_metadata": json.dumps(said)} if pattern else {}
    save_file(path, arrays | more, {"ss_base_model_version": "sdxl_base_v1-0", **metadata})


def seconds(path: Path, failures: list[str]) -> float:
    """The processor time of `inspect` and `convert`, which must end as they may."""
    begin = time.process_time()
    try:
        through_the_command(path)
    except Exception as error:
        failures.append(f"{type(error).__name__}: {error}"[:300])
    return time.process_time() - begin
