"""Every wait, barrier and fence of the kernels for compute capability 9.0 left out, one at a time: does a test see it?

    pytest -n 2 -q tests/engine/backend/waits_left_out.py

Not collected by default; some two minutes. What may go unseen is in `UNSEEN`, with the reason; anything else that does
is either not needed or a gap in the tests. What a variant does not compile is passed over.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flame_train.engine.backend.cuda import dual_gemm
from flame_train.engine.dtype import bfloat16
from flame_train.engine.ops.attention import short_kv, wgmma
from flame_train.engine.ops.linear import skinny_gemm

_SPEC = importlib.util.spec_from_file_location("written_out", Path(__file__).with_name("test_written_out.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
T = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(T)

UNSEEN = {
    "show_barriers()": "a fence of memory: the stand-in has no stale copies",
    "await_turn(group)": "who multiplies first is a matter of speed",
    "__syncwarp()": "so are a warp's lanes, which the load before it holds together",
    "__syncthreads()  // all places have been read": "products are over for a warpgroup as a whole",
    "making: sent<BUFFERS - 1>()": "two blocks in two buffers, of which the second was free",
}
CALL = re.compile(
    r"(?<![\w.])(wait|__syncthreads|__syncwarp|products_done<[^>]*>|show_to_sender|show_barriers|sent<[^>]*>|cluster_sync"
    r"|begin_products|end_products|arrive_at|expect|warpgroup_sync|await_turn|next_turn)\("
)


def captions(computing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in ((2, 2, 200, 77), (1, 1, 448, 80)):
        T.check_attention(case, bfloat16)
    T.test_attention_to_a_caption_by_few_blocks(computing, monkeypatch)


def positions(computing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for case, multiprocessors in (((2, 2, 200, 200), 2), ((1, 2, 130, 700), 1)):
        T.test_attention_by_warpgroups(computing, case, multiprocessors, monkeypatch)


def factors(computing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for multiprocessors in (132, 1):
        T.test_gradients_of_lora_factors(computing, 1000, 72, 136, 3, 16, False, multiprocessors, monkeypatch)


def pairs(tile: dual_gemm.Tile, across: bool, thin: bool) -> Callable[..., None]:
    return lambda computing, _: T.test_two_products_in_one_pass(computing, tile, across, thin)


MAKING = dual_gemm.MAKING[1]
KERNELS: dict[str, tuple[Any, str, tuple[Any, ...], Callable[..., None]]] = {
    "short_kv_forward": (short_kv, "_forward_text", (bfloat16,), captions),
    "short_kv_gradients": (short_kv, "_gradients_text", (bfloat16, 2), captions),
    "attention_forward": (wgmma, "_forward_text", (bfloat16,), positions),
    "attention_gradients": (wgmma, "_gradients_text", (bfloat16, False, False), positions),
    "lora_gradients": (skinny_gemm, "_text", (bfloat16, 3, 1, 8, 1, 6), factors),
    "paired": (
        dual_gemm,
        "source",
        (dual_gemm.TILES[3], False, 16, bfloat16),
        pairs(dual_gemm.TILES[3], False, False),
    ),
    "making": (dual_gemm, "source", (replace(MAKING, thin=16), True, 16, bfloat16), pairs(MAKING, True, True)),
}


def without_branches(text: str) -> str:
    """The text with what its #if MADE leaves out blanked, so that places stay."""
    made, kept = "#define MADE 1" in text, [True]
    lines = []
    for line in text.splitlines(keepends=True):
        if line.startswith("#if "):
            kept.append(made if line.strip() == "#if MADE" else True)
        elif line.startswith("#else"):
            kept[-1] = not kept[-1] if "MADE" in text else kept[-1]
        elif line.startswith("#endif"):
            kept.pop()
        lines.append(line if all(kept) else " " * (len(line) - 1) + "\n")
    return "".join(lines)


def places(kernel: str) -> list[tuple[int, int, str]]:
    """Where each call begins, how long it is and what it says, from the text's end; definitions are none."""
    module, name, arguments, _ = KERNELS[kernel]
    text = without_branches(getattr(module, name)(*arguments))
    found = []
    for call in CALL.finditer(text):
        line = text[text.rfind("\n", 0, call.start()) + 1 : text.index("\n", call.start())]
        if "__forceinline__ void" in line or line.lstrip().startswith("//"):
            continue
        depth, end = 1, call.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append((call.start() - len(text), end - call.start(), line.strip()))
    return found


@pytest.mark.parametrize(("kernel", "at"), [(k, place) for k in KERNELS for place in places(k)], ids=str)
def test_it_is_seen(computing: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, at: tuple[int, int, str]) -> None:
    (begin, size, line), (module, name, _, check) = at, KERNELS[kernel]
    text = getattr(module, name)

    def without(*arguments: Any) -> str:
        whole: str = text(*arguments)
        place = len(whole) + begin
        return f"{whole[:place]}(void)0{whole[place + size :]}"

    monkeypatch.setattr(module, name, without)
    try:
        check(computing, monkeypatch)
    except AssertionError:
        return
    call = text(*KERNELS[kernel][2])[begin : begin + size or None]
    said = f"{call}  {line[line.find('//') :]}" if "//" in line else call
    reasons = [
        why for unseen, why in UNSEEN.items() if said.startswith(unseen) or f"{kernel}: {said}".startswith(unseen)
    ]
    assert reasons, f"unseen: {line}"
    pytest.skip(reasons[0])  # known not to be seen, and why
