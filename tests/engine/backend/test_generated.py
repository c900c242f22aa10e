"""Generated kernels, their values included, without a GPU: compiled as C++ and run thread by thread over the stand-in.

How is said in machine.cpp. Truth is the fp64 reference on the rounded inputs. The rule is that of tests/gpu: at most
twice the error of the reference in the tested dtype plus one ulp.
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine.dtype import is_float
from flame_train.engine.gradcheck import generator
from flame_train.engine.nn.loading import NonFiniteFlags
from flame_train.engine.op import REGISTRY, Op, Sample, sample
from flame_train.engine.op_samples import materialise, tensor_arguments
from flame_train.engine.ops.linear.scaled import transposed
from flame_train.engine.ops.norm import group_norm_launch
from tests.engine.conftest import some_and_proof

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiler")]

OPS = """
adaptive_avg_pool2d add amax avg_pool2d batch_norm batch_norm_inference batch_norm_train binary_cross_entropy
binary_cross_entropy_with_logits cast celu clamp clone cross_entropy dora_gain embedding flip fp8_quantize
gated_add gather geglu gelu glu getitem hadamard_add hardsigmoid hardtanh huber_loss index_select int8_quantize kl_div
kron_add l1_loss layer_norm layer_norm_modulate lerp log_softmax logical_and logical_not logical_or logical_xor
logsigmoid logsumexp masked_fill max_pool2d mean mish mse_loss mul narrow nf4_dequantize nf4_quantize nll_loss norm
one_hot pad pixel_shuffle pixel_unshuffle prelu quick_gelu relu6 repeat_interleave rms_norm rms_norm_rope rope
scaled_dequantize scatter scatter_add selu silu softmax softsign stack std sub sum swiglu take_along_dim tril triu
var where
""".split()
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
CI_AND_PROOF = [pytest.param(DTYPES[0], marks=pytest.mark.proof), DTYPES[1]]
"""bf16, and fp32 where proofs are asked for: a compiler takes most of the time."""

LENGTHS: dict[str, list[Sample]] = {
    "adaptive_avg_pool2d": [sample((3, 5, 7, 7), 1), sample((1, 9, 5, 3), 1)],
    "hadamard_add": [
        sample((m, n), (m, r), (r, n), (m, r), (r, n), 0.5) for m, n, r in ((67, 260, 4), (66, 131, 19), (2, 516, 33))
    ],
    "kron_add": [
        sample((8, 4160), (4, 2), (2, 2080), 0.5),
        sample((4, 2100), (2, 2), (2, 1050), 0.5),
        sample((4352, 8), (64, 1), (68, 8), 0.5),
        sample((8840, 3), (130, 3), (68, 1), 0.5),
    ],
    "mul": [sample((13, 7, 5), (7, 1)), sample((6, 5, 3, 7), (6, 1, 3, 1)), sample((9, 11), (11,))],
    "lerp": [sample((3, 5, 7, 9), (5, 1, 1), (3, 1, 1, 9))],
    "softmax": [sample((n, c), -1) for n, c in ((1, 77), (19, 9), (9, 129), (3, 513), (2, 1280), (17, 642))],
    "layer_norm": [sample((n, c), (c,), (c,), (c,)) for n, c in ((9, 77), (8, 131), (2, 2560), (1, 3072), (3, 1284))],
    "rms_norm_rope": [
        *(sample((2, 3, 5, c), (c,), (5, c), (5, c)) for c in (22, 70, 640)),
        *(sample((2, 3, 5, c), (c,), (5, c), (5, c), 1e-6, False) for c in (8, 40, 64, 96, 128, 256, 512)),
    ],
    "rope": [sample((2, 7, 3, c), (7, 1, c), (7, 1, c), False) for c in (8, 72, 128, 256)],
    "var": [sample((9, 601), 0), sample((3, 4099), -1), sample((2, 1100, 13), 1), sample((3, 24_576 // 3), (0, 1))],
    "sum": [
        sample((3000, 13), 0),
        sample((2, 900, 24), 1),
        sample((20_001,)),
        sample((3, 9001), -1),
        sample((5, 600), 0),
    ],
    "amax": [sample((1100, 40), 0), sample((2, 17_000), -1)],
    "std": [sample((1500, 40), 0), sample((2, 500, 6), 1), sample((2, 12_000), -1)],
    "layer_norm_modulate": [sample((3, 5, 78), (3, 1, 78), (3, 1, 78)), sample((1, 4, 1536), (1536,), (1536,))],
}
"""Rows whole among threads or not, long and short, those that go through shared memory in blocks full or not.

Sums and variances of what one block reduces, and of what several share. Packets that go on from row to row.
Kronecker products of which a block sees a part of a row, one row, several. Elementwise products whose last tiles and
chunks of the rank are not full, of rows whose length is and is not a multiple of a packet.
"""


def on(bound: dict[str, Any], op: Op, device: str, dtype: Any) -> dict[str, Any]:
    def move(t: Any) -> Any:
        return (
            flame.tensor(t.numpy(), dtype if is_float(t.dtype) else None, device) if isinstance(t, flame.Tensor) else t
        )

    return {n: move(v) if n in op.tensor_names else v for n, v in bound.items()}


def first(result: Any) -> flame.Tensor:
    return result[0] if isinstance(result, tuple) else result


def results(op: Op, bound: dict[str, Any], weight: np.ndarray | None) -> list[np.ndarray]:
    """The output and all gradients; the cotangent arrives twice, so that gradients are added to held ones as well."""
    leaves = [
        t.requires_grad_() for a, _, t in tensor_arguments(op, bound) if a in op.differentiable and is_float(t.dtype)
    ]
    made = [first(op(**bound)), first(op(**bound))]
    values = [np.asarray(made[0].numpy(), np.float64)]
    if weight is None or not leaves:
        return values
    cotangent = flame.tensor(weight, made[0].dtype, made[0].device)
    grads = flame.grad(made, leaves, [cotangent, cotangent])
    return [*values, *(np.asarray(g.numpy(), np.float64) for g in grads)]


def distance(got: np.ndarray, truth: np.ndarray) -> float:
    assert got.shape == truth.shape
    scale = np.linalg.norm(truth)
    return float(np.linalg.norm(got - truth) / scale) if scale else float(np.linalg.norm(got))


def cases(dtype: Any) -> list[tuple[str, int, Op, dict[str, Any]]]:
    found = []
    for name in OPS:
        op = REGISTRY[name]
        for i, s in enumerate([*op.iter_samples(), *op.iter_perf_samples(), *LENGTHS.get(name, [])]):
            bound = materialise(op, s, generator(name, i), dtype)
            if "dtype" in bound:
                bound["dtype"] = dtype
            if sum(t.size for _, _, t in tensor_arguments(op, bound)) <= 60_000:
                found.append((name, i, op, bound))
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the first run computes with what memory holds
@pytest.mark.parametrize("dtype", CI_AND_PROOF, ids=lambda d: d.name)
def test_values_and_gradients(gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    drawn = cases(dtype)
    truths = []
    for name, i, op, bound in drawn:
        exact = on(bound, op, "cpu", np.dtype(np.float64))
        if "dtype" in exact:
            exact["dtype"] = np.dtype(np.float64)
        weight = generator(name, i + 50).standard_normal(first(op(**exact)).shape).astype(dtype).astype(np.float64)
        truths.append((weight, results(op, exact, weight)))
        results(op, on(bound, op, "cuda", dtype), weight)
    compiled.build()
    for (name, i, op, bound), (weight, truth) in zip(drawn, truths, strict=True):
        plain = results(op, on(bound, op, "cpu", dtype), weight)
        got = results(op, on(bound, op, "cuda", dtype), weight)
        for part, (g, p, t) in enumerate(zip(got, plain, truth, strict=True)):
            if not distance(g, t) <= 2.0 * distance(p, t) + float(ml_dtypes.finfo(dtype).eps):
                wrong.append((name, i, part, distance(g, t), distance(p, t)))
    assert len(compiled.texts) > 100
    assert sum("carry<" in text for text, _ in compiled.texts) > 10
    assert not wrong


@pytest.mark.proof
def test_attention_tile_by_tile(computing: Any) -> None:
    """Masks, grouped heads, heads of any size: what no library's kernel takes."""
    op, launched, dtype = REGISTRY["scaled_dot_product_attention"], list[str](), np.dtype(np.float32)
    get = computing.kernels._modules.get
    computing.kernels._modules.get = lambda *asked: launched.append(asked[0]) or get(*asked)
    for i, s in enumerate([*op.iter_samples(), *op.iter_perf_samples()]):
        bound = materialise(op, s, generator(op.name, i), dtype)
        tensors = sum(t.size for _, _, t in tensor_arguments(op, bound))
        if bound.get("dropout_p") or tensors > 130_000:  # dropout is matrix products and generated kernels
            continue
        exact = on(bound, op, "cpu", np.dtype(np.float64))
        weight = generator(op.name, i + 50).standard_normal(first(op(**exact)).shape)
        weight = weight.astype(dtype).astype(np.float64)
        truth, plain, got = (
            results(op, on(bound, op, device, kind), weight)
            for device, kind in (("cpu", np.dtype(np.float64)), ("cpu", dtype), ("cuda", dtype))
        )
        for part, (g, p, t) in enumerate(zip(got, plain, truth, strict=True)):
            assert distance(g, t) <= 2.0 * distance(p, t) + float(np.finfo(dtype).eps), (i, part)
    assert set(launched) == {f"ops/attention/tiled_{head}.cu" for head in (64, 128, 256, 512)}


def opened(name: str, given: dict[str, flame.Tensor]) -> flame.Tensor:
    """A norm of eight groups, of one array or of two with what is added to them."""
    if "other" not in given:
        made: flame.Tensor = getattr(F, name)(given["input"], 8, given["weight"], given["bias"], layout="NHWC")
        return made
    return F.cat_group_norm_silu(given["input"], given["other"], 8, given["weight"], given["bias"], given["shift"])


@some_and_proof(7)
@pytest.mark.parametrize("name", ["group_norm", "group_norm_silu", "cat_group_norm_silu"])
def test_group_norms(computing: Any, name: str, every: int, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three blocks an image that wait for each other, one, one for several images; all, some and few pixels kept."""
    grids = set[tuple[int, ...]]()
    plan = group_norm_launch.Plan.__init__

    def planned(self: Any, *args: Any) -> None:
        plan(self, *args)
        grids.add(self.grid)

    monkeypatch.setattr(group_norm_launch.Plan, "__init__", planned)

    def found(shape: tuple[int, ...], wanted: list[str], device: str, kind: Any) -> list[np.ndarray]:
        rng, channels = generator(name, sum(shape)), shape[-1]
        whole, split = 2.0 + rng.standard_normal(shape), channels - channels // 16 * 8
        drawn = {n: rng.standard_normal(channels) for n in ("weight", "bias")}
        drawn |= {"input": whole[..., :split], "other": whole[..., split:]} if "cat" in name else {"input": whole}
        drawn |= {"shift": rng.standard_normal((shape[0], channels))} if "cat" in name else {}
        given = {n: flame.tensor(v, kind, device, requires_grad=n in wanted) for n, v in drawn.items()}
        made = [opened(name, given) for _ in range(2)]
        # They arrive twice, so that gradients are added to held ones as well.
        cotangents = [flame.tensor(rng.standard_normal(shape), kind, device)] * 2
        return [t.numpy() for t in (made[0], *flame.grad(made, [given[n] for n in wanted], cotangents))]

    monkeypatch.setattr(computing.kernels._modules, "generated", compiled.generated)
    shapes = [((2, 9, 7, 64), 2), ((3, 40, 40, 16), 2), ((2, 5, 3, 72), 2), ((2, 12, 11, 512), 7)]
    asked = "input weight bias", "input", "weight", "bias input"
    asked = ("other input weight bias", "other", *asked[1:]) if "cat" in name else asked
    wanted = [names.split() for names in asked]
    cases = [(shape, names, cores) for shape, cores in shapes for names in wanted]
    for shape, names, cores in cases:
        monkeypatch.setattr(computing.kernels, "multiprocessors", cores)
        found(shape, names, "cuda", np.dtype(np.float32))
    assert grids == {(1, 2), (3, 2)}
    compiled.build()
    for (shape, names, cores), shared in [*itertools.product(cases, (227 << 10, 128 << 10, 99 << 10))][::every]:
        monkeypatch.setattr(computing.kernels, "multiprocessors", cores)
        monkeypatch.setattr(computing.kernels, "shared_bytes", shared)
        got, truth = (
            found(shape, names, *on) for on in (("cuda", np.dtype(np.float32)), ("cpu", np.dtype(np.float64)))
        )
        for g, t in zip(got, truth, strict=True):
            assert distance(g, t) < 3e-6
    assert not (computing.kernels.barriers & 0x7FFFFFFF).any(), "all who came have gone"


HEADS, HEAD = 3, 16


def attended(t: dict[str, flame.Tensor]) -> flame.Tensor:
    """What comes before a joint attention and beside it, its operands and gradients slices of one array."""
    made = F.linear(t["x"], t["w"])
    q, k, v, hidden = F.split(made, (48, 48, 48, 96), dim=-1)
    q, k, v = (a.reshape(*a.shape[:2], HEADS, HEAD) for a in (q, k, v))
    q = F.rms_norm_rope(q, t["scale"], t["cos"], t["sin"]).transpose(1, 2)
    k = F.rms_norm(k, (HEAD,), t["scale"]).transpose(1, 2)
    text, image = F.split(q * k * v.transpose(1, 2), (2, 5), dim=2)
    text, image = (F.layer_norm(a.transpose(1, 2), (HEAD,)) for a in (text, image))
    found = F.cat([text, image], dim=1).reshape(*made.shape[:2], -1)
    return F.cat_gelu(F.layer_norm_modulate(found, t["shift"], t["shift"]), hidden, approximate="tanh")


def joint(t: dict[str, flame.Tensor]) -> flame.Tensor:
    """Two streams side by side, each a slice of the tokens."""
    streams = [F.split(F.linear(x * 1.0, t["w"]), (48, 48, 48, 96), dim=-1) for x in F.split(t["x"], (2, 5), dim=1)]
    q, k, v = ([s[i].reshape(*s[i].shape[:2], HEADS, HEAD) for s in streams] for i in range(3))
    q = F.cat_rms_norm(q, [t["scale"], t["scale"]], t["cos"], t["sin"], dim=1)
    k = F.cat_rms_norm(k, [t["scale"], t["scale"]], dim=1)
    found = (q * k * F.cat(v, dim=1)).reshape(*q.shape[:2], -1)
    return F.cat_gelu(found, F.cat([s[3] for s in streams], dim=1), approximate="tanh")


TABLE = (7, 1, HEAD)
SHAPES = {"x": (2, 7, 24), "w": (240, 24), "scale": (HEAD,), "cos": TABLE, "sin": TABLE, "shift": (48,)}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("network", [attended, joint])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_rows_are_read_and_written_where_they_lie(
    gpu: Any, dtype: Any, network: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = generator("rows", 0)
    drawn = {n: rng.standard_normal(s).astype(dtype).astype(np.float64) for n, s in SHAPES.items()}
    weight = rng.standard_normal((2, 7, 144))
    copies: list[Any] = []

    def found(device: str, kind: Any) -> list[np.ndarray]:
        leaves = {n: flame.tensor(v, kind, device, requires_grad=n in ("x", "w")) for n, v in drawn.items()}
        y = network(leaves)
        grads = flame.grad(y, [leaves["x"], leaves["w"]], [flame.tensor(weight, kind, device)])
        return [np.asarray(a.numpy(), np.float64) for a in (y, *grads)]

    truth, plain = found("cpu", np.dtype(np.float64)), found("cpu", dtype)
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    found("cuda", dtype)
    compiled.build()
    copy = type(gpu.kernels).copy
    monkeypatch.setattr(type(gpu.kernels), "copy", lambda k, *a: copies.append(a) or copy(k, *a))
    got = found("cuda", dtype)
    for g, p, t in zip(got, plain, truth, strict=True):
        assert distance(g, t) <= 2.0 * distance(p, t) + float(ml_dtypes.finfo(dtype).eps)
    assert not copies, "each slice is read and written where it lies"


@pytest.mark.parametrize("shape", [(3000, 8), (700, 640), (2570, 3), (40_000,), (3, 9001)])
def test_blocks_that_share_a_reduction_meet_again_and_again(
    gpu: Any, shape: tuple[int, ...], compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = generator("meet", 0).standard_normal(shape).astype(np.float32)
    grids: list[tuple[int, ...]] = []

    def generated(text: str, kernel: str) -> Any:
        run = compiled.generated(text, kernel)
        return lambda grid, block, args: grids.append(grid) or run(grid, block, args)

    monkeypatch.setattr(gpu.kernels._modules, "generated", generated)
    x, dim = flame.tensor(drawn, device="cuda"), -1 if shape[-1] > 9000 else 0

    def found() -> list[np.ndarray]:
        return [f(x, dim).numpy() for f in (F.sum, F.amax, F.var)]

    found()
    assert len(grids) == 3, "one launch each"
    assert all(grid[1] > 1 for grid in grids[:2])
    compiled.build()
    once, again = found(), found()
    wide = drawn.astype(np.float64)
    for got, same, truth in zip(once, again, (wide.sum(dim), wide.max(dim), wide.var(dim, ddof=1)), strict=True):
        np.testing.assert_array_equal(got, same)
        np.testing.assert_allclose(got, truth, rtol=1e-5, atol=1e-4)
    assert not gpu.kernels.columns.counters.any()


@pytest.mark.parametrize("dim", [0, None])
def test_a_variance_far_from_zero_keeps_its_digits(
    gpu: Any, dim: int | None, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = (1000.0 + generator("far", 0).standard_normal((3000, 6))).astype(np.float32)
    x = flame.tensor(drawn, device="cuda")
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    F.var(x, dim)
    compiled.build()
    np.testing.assert_allclose(F.var(x, dim).numpy(), drawn.astype(np.float64).var(dim, ddof=1), rtol=1e-5)


def test_pairs_at_odd_distances(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = generator("pairs", 0)
    drawn, cos, sin = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 9), (4, 6), (4, 6)))

    def found(device: str) -> list[np.ndarray]:
        whole, c, s = (flame.tensor(a, device=device) for a in (drawn, cos, sin))
        whole.requires_grad_()
        parts = F.split(whole, (1, 6, 2), dim=-1)
        y = F.rope(parts[1], c, s)
        return [y.numpy(), flame.grad(y, [whole], [y.detach()])[0].numpy()]

    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    found("cuda")
    compiled.build()
    for got, truth in zip(found("cuda"), found("cpu"), strict=True):
        np.testing.assert_allclose(got, truth, rtol=1e-6, atol=1e-6)


def test_codes_are_turned(gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [np.random.default_rng(0).integers(0, 256, s).astype(np.uint8) for s in ((16, 48), (80, 64), (208, 336))]
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    for codes in drawn:
        transposed(gpu.kernels, gpu.to_device(codes))
    compiled.build()
    for codes in drawn:
        np.testing.assert_array_equal(transposed(gpu.kernels, gpu.to_device(codes)).get(), codes.T)


def test_a_reduction_has_more_outputs_than_a_grid_has_places_in_y(gpu: Any) -> None:
    x = flame.tensor(np.ones((70_000, 2, 4), np.float32), device="cuda")
    assert flame.functional.sum(x, 1).shape == (70_000, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_is_not_finite_is_marked_wherever_it_stands(
    gpu: Any, dtype: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)

    def found(size: int) -> Any:
        arrays = [np.ones(size, dtype) for _ in range(5)]
        for array, value, at in zip(arrays, (np.nan, np.inf, -np.inf), (0, size // 2, -1), strict=False):
            array[at] = value
        marks = NonFiniteFlags(gpu, len(arrays))
        for place, array in enumerate(arrays):
            marks.check(place, gpu.to_device(array))
        return marks.places()

    sizes = [1, 7, 8, 4099]
    for size in sizes:
        found(size)
    compiled.build()
    assert [found(size) for size in sizes] == [[0, 1, 2]] * 4


def test_indices_out_of_range_wrap_around_and_classes_count_nothing(
    gpu: Any, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = generator("out of range", 0)
    monkeypatch.setattr(gpu.kernels._modules, "generated", compiled.generated)
    table, x = (rng.standard_normal(s).astype(np.float32) for s in ((5, 8), (6, 8)))
    rows, classes = np.array([7, -1, 2, 5, -9, 2]), np.array([9, -1, 3, -100, -3, 0])

    def found() -> list[np.ndarray]:
        weight, logits = (flame.tensor(a, device="cuda", requires_grad=True) for a in (table, x))
        at = flame.tensor(classes, device="cuda")
        taken = F.embedding(flame.tensor(rows, device="cuda"), weight)
        picked = F.gather(logits, 1, at.reshape(6, 1))
        losses = [f(logits, at, reduction="none") for f in (F.cross_entropy, F.nll_loss)]
        added = flame.grad(taken, [weight], [flame.tensor(x, device="cuda")])[0]
        spread = flame.grad(picked, [logits], [flame.tensor(np.ones((6, 1), np.float32), device="cuda")])[0]
        slope = flame.grad(losses[0], [logits], [flame.tensor(np.ones(6, np.float32), device="cuda")])[0]
        return [t.numpy() for t in (taken, picked, *losses, added, spread, slope)]

    found()
    compiled.build()
    taken, picked, entropy, likelihood, added, spread, slope = found()
    each, counts, inside = np.arange(6), classes != -100, (classes >= 0) & (classes < 8)
    sums, ones, chances = np.zeros_like(table), np.zeros_like(x), np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.add.at(sums, rows % 5, x)
    ones[each, classes % 8] = 1.0
    np.testing.assert_array_equal(taken, table[rows % 5])
    np.testing.assert_array_equal(picked[:, 0], x[each, classes % 8])
    np.testing.assert_array_equal(spread, ones)
    np.testing.assert_allclose(added, sums, rtol=1e-6)
    np.testing.assert_allclose(likelihood, -x[each, classes % 8] * counts)
    np.testing.assert_allclose(entropy, -np.log(chances[each, classes % 8]) * inside, rtol=1e-5)
    np.testing.assert_allclose(slope, (chances - ones) * inside[:, None], atol=1e-6)
