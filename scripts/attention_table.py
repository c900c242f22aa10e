"""Attention beside PyTorch's at the sizes of real networks: time, memory and which kernels run, as a Markdown table.

    python scripts/attention_table.py [--only PATTERN] [--dtype bf16|fp16|fp32] [--jobs N] [--unfused] [--json FILE]

Times are of captured calls on this machine's GPU, inputs on the device; a gradient's are those of query, key and value.
Both sides run in both modes: with the same bits every run ("exact"), and with sums in any order. PyTorch's times are of
the fastest of its backends that has the mode, in the same process: it has no exact gradients by cuDNN, and with
`warn_only` none at all. A ratio is our time over PyTorch's in the same mode, of forward and backward together; the last
is of exact ones over PyTorch's in any order. Memory is what a call and its
gradients take beyond the inputs. `--unfused` adds two products and a softmax, ours. `--jobs` processes first fill the
cache of plans and kernels. Exits with 1 where a ratio in the same mode is above 1.1, or a row failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

import flame_train.engine as flame
from benchmarks.torch_ops import arguments
from flame_train.engine import Tensor
from flame_train.engine import functional as F
from flame_train.engine.backend import get_backend
from flame_train.engine.mode import deterministic
from flame_train.engine.random import Rng
from flame_train.tools.bench.timing import seconds

WITHIN, MIB, UNFUSED_BYTES = 1.1, 2**20, 24 * 2**30
MODES = {"exact": True, "any order": False}


@dataclass(frozen=True)
class Size:
    """One call: (batch, heads, key heads, queries, keys, head size), and what bars keys."""

    network: str
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    head: int
    mask: str = ""
    causal: bool = False
    dropout: float = 0.0

    @property
    def shape(self) -> str:
        return f"{self.batch}, {self.heads}/{self.key_heads}, {self.queries} x {self.keys}, {self.head}"

    @property
    def barred(self) -> str:
        parts = ["causal" * self.causal, self.mask, f"dropout {self.dropout}" if self.dropout else ""]
        return " and ".join(filter(None, parts)) or "none"


SIZES = [
    Size("Flux", 1, 24, 24, 4608, 4608, 128),
    Size("Qwen-Image", 1, 30, 30, 4608, 4608, 128, "keys, bool"),
    Size("Qwen-Image", 4, 30, 30, 4608, 4608, 128, "keys, bool"),
    Size("Krea 2", 1, 48, 12, 4608, 4608, 128),
    Size("Krea 2", 1, 48, 12, 4608, 4608, 128, "keys, bool"),
    Size("text encoder", 8, 32, 8, 512, 512, 128, causal=True),
    Size("text encoder", 8, 32, 8, 512, 512, 128, "keys, bool", causal=True),
    Size("cross attention", 4, 16, 16, 4096, 512, 128, "keys, bool"),
    Size("SDXL", 4, 10, 10, 4096, 4096, 64),
    Size("SDXL", 4, 10, 10, 4096, 4096, 64, causal=True),
    Size("SDXL", 4, 10, 10, 4096, 4096, 64, "keys, bool"),
    Size("SDXL, a caption", 4, 20, 20, 1024, 77, 64, "keys, bool"),
    Size("SD3.5 medium", 4, 24, 24, 4429, 4429, 64, "keys, bool"),
    Size("SD3.5 large", 1, 38, 38, 4429, 4429, 64),
    Size("Z-Image", 1, 30, 30, 4224, 4224, 128, "keys, bool"),
    Size("Flux, regions", 1, 24, 24, 4608, 4608, 128, "pairs, bool"),
    Size("learnt bias", 4, 16, 16, 1024, 1024, 64, "heads, added"),
    Size("head of 256", 1, 16, 8, 4096, 4096, 256, "keys, bool"),
    Size("Flux at 2048", 1, 24, 24, 16384, 16384, 128),
    Size("dropout", 4, 16, 16, 1024, 1024, 64, dropout=0.1),
    Size("dropout", 4, 10, 10, 4096, 4096, 64, dropout=0.1),
    Size("dropout", 1, 24, 24, 4608, 4608, 128, dropout=0.1),
    Size("dropout", 8, 32, 8, 512, 512, 128, causal=True, dropout=0.1),
    Size("dropout", 4, 16, 16, 1024, 1024, 64, "keys, bool", dropout=0.1),
]


@dataclass
class Row:
    """Milliseconds and bytes of one size, by mode; None, or no such mode, where there is no measurement."""

    size: Size
    backends: dict[str, str] = field(default_factory=dict)
    torch_forward: dict[str, float] = field(default_factory=dict)
    torch_backward: dict[str, float] = field(default_factory=dict)
    torch_bytes: int | None = None
    forward: float = 0.0
    backward: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    kernels: str = ""
    unfused: tuple[float, float] | None = None
    unfused_bytes: int | None = None

    def ratio(self, how: str, over: str) -> float | None:
        """Our forward and backward in the mode `how` over PyTorch's in the mode `over`."""
        if over not in self.torch_forward:
            return None
        return (self.forward + self.backward[how]) / (self.torch_forward[over] + self.torch_backward[over])


# ---- ours ----------------------------------------------------------------------------------------------


def drawn(size: Size, dtype: str) -> dict[str, Any]:
    """The call's arguments, heads lying as a projection leaves them, all but the mask differentiable."""
    rng = np.random.default_rng(0)

    def by_head(length: int, heads: int) -> Tensor:
        values = rng.standard_normal((size.batch, length, heads, size.head), np.float32)
        return Tensor(flame.tensor(values, dtype, "cuda").data.transpose(0, 2, 1, 3), requires_grad=True)

    mask = mask_of(size, rng)
    rng_ = None
    if size.dropout:
        xp = get_backend("cuda").references
        rng_ = Rng(xp, 7, 3, xp.arange(size.batch))
    return {
        "rng": rng_,
        "query": by_head(size.queries, size.heads),
        "key": by_head(size.keys, size.key_heads),
        "value": by_head(size.keys, size.key_heads),
        "attn_mask": None if mask is None else flame.tensor(mask, None if mask.dtype == bool else dtype, "cuda"),
        "dropout_p": size.dropout,
        "is_causal": size.causal,
        "enable_gqa": size.heads != size.key_heads,
    }


def mask_of(size: Size, rng: np.random.Generator) -> np.ndarray[Any, Any] | None:
    """Keys behind a sample's end; pairs at random, as regions have them; or numbers a head."""
    if size.mask == "keys, bool":
        ends = rng.integers(size.keys // 2, size.keys + 1, size.batch)
        return np.arange(size.keys) < ends[:, None, None, None]
    if size.mask == "pairs, bool":
        return rng.random((size.batch, 1, size.queries, size.keys)) < 0.8
    if size.mask == "heads, added":
        return rng.standard_normal((1, size.heads, size.queries, size.keys), np.float32)
    return None


def attend(given: dict[str, Any]) -> Tensor:
    found: Tensor = F.scaled_dot_product_attention(**given)
    return found


def unfused(given: dict[str, Any]) -> Tensor:
    """Scores, softmax and product, each written to memory."""
    q, k, v, mask = (given[n] for n in ("query", "key", "value", "attn_mask"))
    if given["enable_gqa"]:  # a dim for the heads that share keys
        q = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:])
        k, v, mask = (None if x is None else x.unsqueeze(2) for x in (k, v, mask))
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if mask is not None:
        scores = F.where(mask, scores, -float("inf")) if mask.dtype == bool else scores + mask
    if given["is_causal"]:
        scores = F.where(flame.tensor(np.tri(*scores.shape[-2:]) > 0, device="cuda"), scores, -float("inf"))
    return (scores.softmax(-1) @ v).reshape(given["query"].shape)


def ours(fn: Callable[[dict[str, Any]], Tensor], given: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward and the backward pass as functions, each having run once."""
    leaves = [given[n] for n in ("query", "key", "value")]
    out = fn(given)
    g = Tensor(out.data.copy())

    def forward() -> Any:
        with flame.no_grad():
            return fn(given)

    def backward() -> Any:
        return flame.grad([out], leaves, [g], retain_graph=True)

    forward(), backward()
    return forward, backward


def taken(fn: Callable[[dict[str, Any]], Tensor], given: dict[str, Any]) -> int:
    """The most bytes that a call and its gradients take beyond what there is already."""
    backend = get_backend("cuda")
    backend.synchronize()
    backend.empty_cache()
    backend.reset_peak()
    before = backend.memory().live
    out = fn(given)
    flame.grad([out], [given[n] for n in ("query", "key", "value")], [Tensor(out.data.copy())])
    peak = backend.memory().peak
    assert peak is not None
    return peak - before


# ---- PyTorch's -----------------------------------------------------------------------------------------


def theirs(torch: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """PyTorch's call on the same memory; it takes a mask or causal, so both become one mask, made beforehand."""
    a = arguments(torch, given)
    if a["is_causal"] and a["attn_mask"] is not None:
        lower = torch.ones(a["query"].shape[2], a["key"].shape[2], device="cuda", dtype=torch.bool).tril()
        a["attn_mask"], a["is_causal"] = a["attn_mask"] & lower, False
    for name in ("query", "key", "value"):
        a[name] = a[name].detach().requires_grad_()
    call = torch.nn.functional.scaled_dot_product_attention
    return lambda: (call(**a), [a[n] for n in ("query", "key", "value")])


@contextmanager
def asked(torch: Any, backend: Any, exact: bool) -> Iterator[None]:
    """One backend alone, and the same bits every run or not. Raises RuntimeError in here for a backend without them."""
    torch.use_deterministic_algorithms(exact)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which is no part of the call
    try:
        with torch.nn.attention.sdpa_kernel(backend):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def torch_times(torch: Any, call: Callable[[], Any], row: Row) -> None:
    """Fills in PyTorch's times, in each mode of the backend that is fastest there forward and backward."""
    kinds = torch.nn.attention.SDPBackend
    for how, exact in MODES.items():
        best = float("inf")
        for kind in (kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION):
            stream = torch.cuda.Stream()
            try:
                with asked(torch, kind, exact):
                    with torch.no_grad():
                        forward = _replayed(torch, stream, call)
                    with torch.cuda.stream(stream):
                        out, leaves = call()
                    g = out.detach().clone()
                    if row.size.dropout:
                        backward = _replayed(torch, stream, partial(_both, torch, call, g)) - forward
                    else:
                        again = partial(torch.autograd.grad, out, leaves, g, retain_graph=True)
                        backward = _replayed(torch, stream, again)
            except RuntimeError:
                torch.cuda.synchronize()  # not its kind of call
                continue
            if forward + backward < best:
                best = forward + backward
                row.backends[how] = kind.name.split("_")[0].lower()
                row.torch_forward[how], row.torch_backward[how] = forward, backward


def _both(torch: Any, call: Callable[[], Any], g: Any) -> Any:
    """A call and its gradients in one: captured apart from an eager call they read its seed as if on the device."""
    out, leaves = call()
    return torch.autograd.grad(out, leaves, g)


def _replayed(torch: Any, stream: Any, fn: Callable[[], Any]) -> float:
    """Milliseconds a call, the median of some replays of a graph of several."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    repeats = max(1, min(50, int(0.02 / (time.perf_counter() - begin))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [fn() for _ in range(repeats)]
    graph.replay()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    del kept
    return statistics.median(times) / repeats * 1e3


def torch_taken(torch: Any, call: Callable[[], Any]) -> int:
    """As `taken`, by PyTorch's own choice of a backend."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, leaves = call()
    torch.autograd.grad(out, leaves, out.detach().clone())
    return int(torch.cuda.max_memory_allocated() - before)


# ---- the table -----------------------------------------------------------------------------------------


def prepare(size: Size, dtype: str) -> None:
    """Runs all of ours once, so that its plans and kernels are on disk."""
    given = drawn(size, dtype)
    for exact in MODES.values():
        with deterministic(exact):
            ours(attend, given)


def measured(size: Size, dtype: str, also_unfused: bool) -> Row:
    """All figures of one size."""
    import torch
    import torch.nn.attention

    warnings.simplefilter("ignore")  # PyTorch says of each backend why it is not its kind of call
    backend, row, given = get_backend("cuda"), Row(size), drawn(size, dtype)
    row.kernels = chosen(given)
    for how, exact in MODES.items():
        with deterministic(exact):
            there, back = ours(attend, given)
            row.forward = seconds([there], backend) * 1e3
            row.backward[how] = seconds([back], backend) * 1e3
            row.bytes[how] = taken(attend, given)
    call = theirs(torch, given)
    torch_times(torch, call, row)
    if row.torch_forward:
        row.torch_bytes = torch_taken(torch, call)
    scores = size.batch * size.heads * size.queries * size.keys * 2
    if also_unfused and 8 * scores < UNFUSED_BYTES and not size.dropout:
        there, back = ours(unfused, given)
        row.unfused = seconds([there], backend) * 1e3, seconds([back], backend) * 1e3
        row.unfused_bytes = taken(unfused, given)
    backend.empty_cache()
    torch.cuda.empty_cache()
    return row


def chosen(given: dict[str, Any]) -> str:
    """Which kernels run forward and, if they are others, backward, in the mode that asks for the same bits."""
    there = next(i for i, why in flame.explain(F.scaled_dot_product_attention, **given) if why == "chosen")
    found = flame.explain_gradients(F.scaled_dot_product_attention, **given)["query"]
    back = next(i for i, why in found if why == "chosen")
    return there if there == back else f"{there}, {back}"


HEAD = (
    "| network | batch, heads/key heads, queries x keys, head | mask | torch fwd, bwd: exact; any order | "
    "ours fwd, bwd exact, bwd any order | exact | any order | exact over any order | kernels | "
    "MiB torch, exact, any order | unfused fwd, bwd, MiB |"
)


def line(row: Row) -> str:
    def numbers(found: Sequence[float | None], digits: int) -> str:
        return ", ".join("-" if x is None else f"{x:.{digits}f}" for x in found)

    size, pairs = row.size, (("exact", "exact"), ("any order", "any order"), ("exact", "any order"))
    room = [None if b is None else b / MIB for b in (row.torch_bytes, *row.bytes.values())]
    apart = numbers(row.unfused or [None], 2)
    timed = [(row.torch_forward.get(m), row.torch_backward.get(m), row.backends.get(m, "-")) for m in MODES]
    cells = [
        *(size.network, size.shape, size.barred),
        "; ".join(numbers(x, 3) + f" {by}" for *x, by in timed),
        numbers([row.forward, *row.backward.values()], 3),
        *(numbers([row.ratio(*pair)], 2) for pair in pairs),
        *(row.kernels, numbers(room, 0)),
        apart if row.unfused_bytes is None else f"{apart}, {row.unfused_bytes / MIB:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def rows(sizes: Sequence[Size], args: argparse.Namespace) -> Iterator[tuple[Size, Row | str]]:
    """One after another; a size that failed with why."""
    context = multiprocessing.get_context("spawn")
    if args.jobs > 1:
        with ProcessPoolExecutor(args.jobs, context) as pool:
            list(pool.map(prepare, sizes, [args.dtype] * len(sizes)))
    left = list(sizes)
    while left:  # a new process where one died of a size
        with ProcessPoolExecutor(1, context) as pool:
            while left:
                size = left.pop(0)
                try:
                    yield size, pool.submit(measured, size, args.dtype, args.unfused).result()
                except BrokenProcessPool as e:
                    yield size, f"its process died ({e})"
                    break
                except Exception as e:
                    yield size, f"{type(e).__name__}: {e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="networks, a glob")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--unfused", action="store_true")
    parser.add_argument("--json", help="also writes all figures there")
    args = parser.parse_args()
    sizes = [s for s in SIZES if fnmatch.fnmatch(s.network, args.only)]
    print(HEAD, "|---" * (HEAD.count(" | ") + 1) + "|", sep="\n", flush=True)
    found, failed = [], False
    for size, row in rows(sizes, args):
        if isinstance(row, str):
            failed = True
            print(f"{size.network}, {size.shape}, {size.barred}: {row}", flush=True)
            continue
        found.append(row)
        print(line(row), flush=True)
    over = [r for r in found if any((r.ratio(how, how) or 0.0) > WITHIN for how in MODES)]
    print(f"{len(found)} of {len(sizes)} rows; over {WITHIN}: {', '.join(r.size.network for r in over) or 'none'}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump([asdict(r) for r in found], f, indent=1)
    return int(failed or bool(over))


if __name__ == "__main__":
    sys.exit(main())
