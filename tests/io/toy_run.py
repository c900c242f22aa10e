"""A trainer of a few milliseconds: `python toy_run.py FOLDER [POINTS]`, with these failpoints armed.

Its state is a chain of hashes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from flame_train.disk import failpoint
from flame_train.disk.atomic_write import write_atomically
from flame_train.io.runfolder import RunFolder

STEPS = 10


def advance(state: bytes, step: int) -> bytes:
    return hashlib.sha256(state + str(step).encode()).digest() * 64


def files(state: bytes, step: int) -> dict[str, object]:
    return {
        "lora.safetensors": state,
        "optimizer.safetensors": lambda place: write_atomically(place, [state[::-1]], len(state)),
        "state.json": json.dumps({"step": step}).encode(),
    }


def main(folder: Path) -> None:
    with RunFolder(folder, "toy = true\n", lambda old, found: None) as run:
        found = run.resume()
        state, first = b"", 1
        if found is not None:
            state = (found.path / "lora.safetensors").read_bytes()
            first = json.loads((found.path / "state.json").read_bytes())["step"] + 1
            assert (found.path / "optimizer.safetensors").read_bytes() == state[::-1]
        for step in range(first, STEPS + 1):
            state = advance(state, step)
            run.log({"step": step, "loss": state[0]})
            if step % 3 == 0 or step == STEPS:
                run.checkpoint(step, files(state, step), keep=2)
        run.lora.write_bytes(state)


if __name__ == "__main__":
    failpoint.arm(sys.argv[2] if len(sys.argv) > 2 else "")
    main(Path(sys.argv[1]))
