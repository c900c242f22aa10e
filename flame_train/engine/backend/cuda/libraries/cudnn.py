"""Convolution and attention through cuDNN's graph API, with a plan for each problem, kept on disk between runs.

Where the mode asks for determinism the plan is the heuristic's first that adds in a fixed order. Elsewhere its first
few are timed, once for each problem and card.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from .....errors import DeviceFault, EnvironmentFault
from ....dtype import Array, DType, bfloat16, float16, float32, int32
from ....mode import mode
from ..autotuner import AutotuneCache, Autotuner
from ..codegen.broadcast_plan import dense_strides
from ..launch_hooks import LaunchHooks
from ..nvidia_libraries import load
from ..tuning import tuning_for
from ..workspace import Workspace
from .cudnn_plan import Layout, Plan, Steps, collected, flat, nhwc, sdpa_layouts, strided

_LOG = logging.getLogger(__name__)
_CANDIDATES = 8  # plans that are timed
_WORKSPACE_BYTES = 1 << 28  # plans that need more are not timed
_LEAST_LIMIT, _OF_OPERANDS = 1 << 30, 4
"""A convolution's plan works in no more than this many bytes, or this many times its operands.

The heuristic's first has been seen to ask for 165 GiB where a decoder of 144 channels makes an image.
"""


class CuDnn:
    """One handle on the backend's stream and the plans made so far. `cache` keeps plans between runs.

    Raises EnvironmentFault if cuDNN cannot be loaded, and at each call DeviceFault if it has no plan.

    Args:
        cupy: the module.
        stream: the backend's stream.
        cache: keeps choices between runs.
        launch_hooks: what hears of every launch.
        workspace: memory for plans that need some.

    Raises:
        EnvironmentFault: cuDNN cannot be loaded.
    """

    def __init__(
        self, cupy: Any, stream: Any, cache: AutotuneCache, launch_hooks: LaunchHooks, workspace: Workspace
    ) -> None:
        for name in ("nvrtc", "cublasLt", "cublas"):
            load(name)
        try:
            import cudnn
        except ImportError as e:
            raise EnvironmentFault(f"cuDNN's frontend is not installed ({e}); run `flame-train doctor`") from e
        self._cudnn, self._cupy, self._cache, self._launch_hooks = cudnn, cupy, cache, launch_hooks
        self._workspace = workspace
        self._stream, self._aside = stream, cupy.cuda.Stream(non_blocking=True)
        self._autotuner = Autotuner(cupy, stream, tuning_for(int(cupy.cuda.Device().compute_capability)))
        self._version = f"cuDNN {cudnn.backend_version()} through {cudnn.__version__}"
        self._types = {
            float32: cudnn.data_type.FLOAT,
            float16: cudnn.data_type.HALF,
            bfloat16: cudnn.data_type.BFLOAT16,
            int32: cudnn.data_type.INT32,
        }
        try:
            self._handle = cudnn.create_handle()
            cudnn.set_stream(handle=self._handle, stream=stream.ptr)
        except RuntimeError as e:
            raise EnvironmentFault(f"cuDNN did not start ({e}); run `flame-train doctor`") from e
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._lock = threading.Lock()

    # ---- convolution ---------------------------------------------------------------------------------

    def conv_forward(self, x: Array, w: Array, bias: Array | None, out: Array, steps: Steps) -> None:
        """out = conv(x, w) + bias for NHWC x and out, and a weight of any strides.

        Args:
            x: (B, H, W, C).
            w: (out, C, kh, kw).
            bias: (out,), or None.
            out: (B, oh, ow, out).
            steps: how the kernel moves.
        """
        lx, lw, lo = nhwc(x), strided(w), nhwc(out)
        key = ("fprop", x.dtype, *flat(lx, lw, lo), *steps, bias is not None)

        def build(g: Any, t: Callable[..., Any]) -> None:
            y = g.conv_fprop(image=t("x", lx), weight=t("w", lw), **steps.lists())
            if bias is not None:
                k = w.shape[0]
                y.set_data_type(self._types[float32])
                y = g.bias(input=y, bias=t("b", ([1, k, 1, 1], [k, 1, k, k])))
            t("y", lo, output=y)

        arrays = {"x": x, "w": w, "y": out} | ({"b": bias} if bias is not None else {})
        self._run(key, x.dtype, build, arrays)

    def conv_input_gradient(self, g_out: Array, w: Array, dx: Array, steps: Steps) -> None:
        """Returns dx of a convolution, from the gradient of its output (both NHWC)."""
        lg, lw, lx = nhwc(g_out), strided(w), nhwc(dx)
        key = ("dgrad", dx.dtype, *flat(lg, lw, lx), *steps)

        def build(g: Any, t: Callable[..., Any]) -> None:
            t("dx", lx, output=g.conv_dgrad(loss=t("g", lg), filter=t("w", lw), **steps.lists()))

        self._run(key, dx.dtype, build, {"g": g_out, "w": w, "dx": dx})

    def conv_weight_gradient(self, x: Array, g_out: Array, dw: Array, steps: Steps) -> None:
        """Returns dw of a convolution, from its NHWC input and the gradient of its output."""
        lx, lg, lw = nhwc(x), nhwc(g_out), strided(dw)
        key = ("wgrad", x.dtype, *flat(lx, lg, lw), *steps)

        def build(g: Any, t: Callable[..., Any]) -> None:
            t("dw", lw, output=g.conv_wgrad(image=t("x", lx), loss=t("g", lg), **steps.lists()))

        self._run(key, x.dtype, build, {"x": x, "g": g_out, "dw": dw})

    # ---- attention -----------------------------------------------------------------------------------

    def attention_forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        stats: Array,
        scale: float,
        causal: bool,
        bias: Array | None,
        lengths: Array | None = None,
    ) -> None:
        """out and the rows' log-sum-exp for (B, H, L, D) operands of any strides with unit stride along D.

        k and v may have fewer heads, each for as many of q's in a row. A row that the bias bars everywhere gets zeros,
        and minus infinity as its log-sum-exp.

        Args:
            q, out: (B, H, L, D).
            k, v: (B, H, S, D).
            bias: added to the scores, (B or 1, H or 1, L or 1, S).
            stats: fp32 (B, H, L, 1), the log-sum-exp.
            scale: the factor of the scores.
            causal: whether a query attends to no later keys.
            lengths: of each sample its queries and its keys, from the first on, int32 (2, B); what follows is padding.
        """
        mask = {} if bias is None else {"b": bias}
        counts = _counts(lengths)
        arrays = {"q": q, "k": k, "v": v, "o": out, "s": stats, **mask, **counts}
        layouts = sdpa_layouts(arrays, q)
        key = ("sdpa", q.dtype, *flat(*layouts.values()), scale, causal, *mask, *counts)

        def build(g: Any, t: Callable[..., Any]) -> None:
            o, s = g.sdpa(
                q=t("q", layouts["q"]),
                k=t("k", layouts["k"]),
                v=t("v", layouts["v"]),
                attn_scale=scale,
                generate_stats=True,
                use_causal_mask=causal,
                **({"bias": t("b", layouts["b"])} if mask else {}),
                **_padding(layouts, t),
            )[:2]
            t("o", layouts["o"], output=o)
            t("s", layouts["s"], output=s, dtype=float32)

        self._run(key, q.dtype, build, arrays)

    def attention_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        stats: Array,
        g_out: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        scale: float,
        causal: bool,
        bias: Array | None,
        g_bias: Array | None = None,
        lengths: Array | None = None,
    ) -> None:
        """Returns the gradients of attention; bit-equal between runs where the mode asks for determinism.

        `stats` must lie in row-major memory, with infinity for a row that is barred everywhere. Others may have any
        strides, with unit stride along D.

        Args:
            q, out, g_out, dq: (B, H, L, D).
            k, v, dk, dv: (B, H, S, D).
            bias, g_bias: added to the scores; filled with its gradient, of all rows, if wanted.
            stats: fp32 (B, H, L, 1), as the forward pass wrote it.
            scale: the factor of the scores.
            causal: whether a query attends to no later keys.
            lengths: as in `attention_forward`. Gradients of padding are not written.
        """
        counts = _counts(lengths)
        inputs = {"q": q, "k": k, "v": v, "o": out, "g": g_out}
        results = {"dq": dq, "dk": dk, "dv": dv}
        masks = {n: x for n, x in (("b", bias), ("db", g_bias)) if x is not None}
        layouts = sdpa_layouts({**inputs, **results, **masks, **counts}, q)
        layouts["s"] = list(stats.shape), list(dense_strides(stats.shape))  # those of dims of 1 too: cuDNN compares
        exact = mode().deterministic
        key = ("sdpa_backward", q.dtype, *flat(*layouts.values()), scale, causal, exact, *masks, *counts)

        def build(g: Any, t: Callable[..., Any]) -> None:
            made = g.sdpa_backward(
                q=t("q", layouts["q"]),
                k=t("k", layouts["k"]),
                v=t("v", layouts["v"]),
                o=t("o", layouts["o"]),
                dO=t("g", layouts["g"]),
                stats=t("s", layouts["s"], dtype=float32),
                attn_scale=scale,
                use_causal_mask=causal,
                use_deterministic_algorithm=exact,
                **{name: t(n, layouts[n]) for n, name in (("b", "bias"), ("db", "dBias")) if n in masks},
                **_padding(layouts, t),
            )
            for name, tensor in zip(results, made, strict=False):
                t(name, layouts[name], output=tensor)

        self._run(key, q.dtype, build, {**inputs, **results, "s": stats, **masks, **counts})

    # ---- plans ---------------------------------------------------------------------------------------

    def _run(self, key: tuple[Any, ...], dtype: DType, build: Callable[..., None], arrays: dict[str, Array]) -> None:
        key = (*key, mode().deterministic)
        if dtype == float32 and mode().float32_precision == "high":
            key = (*key, "tf32")
        with self._lock:
            plan = self._plans.get(key)
            if plan is None:
                with collected():
                    plan = self._plans[key] = self._make(key, dtype, build, arrays)
            workspace = self._workspace.get(plan.workspace)
            if self._launch_hooks.should_launch("attention" if key[0].startswith("sdpa") else "convolution"):
                plan.graph.execute(plan.pointers(arrays), workspace.data.ptr, handle=self._handle)

    def _make(self, key: tuple[Any, ...], dtype: DType, build: Callable[..., None], arrays: dict[str, Array]) -> Plan:
        """The plan kept on disk, or a new one; during a capture, in which nothing runs, a new one that is not timed."""
        question, capturing = f"{self._version} {key}", mode().capturing
        plan, most = None if capturing else self._restored(key, self._cache.get(question)), _most_bytes(key, arrays)
        if plan is None or (most and plan.graph.get_workspace_size() > most):
            plan = self._described(key, dtype, build, most)
            try:
                if capturing or mode().deterministic:
                    plan.graph.build_plans()
                else:
                    plan.graph.build_plan_at_index(self._fastest(plan, arrays))
            except (RuntimeError, self._cudnn.cudnnGraphNotSupportedError) as e:
                raise DeviceFault(f"cuDNN has no plan for {key}: {e}") from e
            if not capturing:
                self._cache.put(question, plan.kept())
        plan.workspace = plan.graph.get_workspace_size()
        return plan

    def _described(self, key: tuple[Any, ...], dtype: DType, build: Callable[..., None], most: int) -> Plan:
        """The graph that `build` describes, with the plans that may be built for it; `most` is as of `_most_bytes`."""
        cudnn = self._cudnn
        full = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=self._types[dtype],
            intermediate_data_type=full,
            compute_data_type=full,
            handle=self._handle,
        )
        tensors: dict[str, Any] = {}

        def declare(name: str, layout: Layout, output: Any = None, dtype: DType = dtype) -> Any:
            dims, strides = layout
            kind = self._types[dtype]
            if output is None:
                tensors[name] = graph.tensor(name=name, dim=dims, stride=strides, data_type=kind)
            else:
                output.set_output(True).set_data_type(kind).set_dim(dims).set_stride(strides)
                tensors[name] = output
            return tensors[name]

        try:
            build(graph, declare)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            self._restrict(graph, dtype, key[0])
            if most:
                graph.deselect_workspace_greater_than(most)
            graph.check_support()
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError) as e:
            raise DeviceFault(f"cuDNN has no plan for {key}: {e}") from e
        return Plan(graph, tensors)

    def _fastest(self, plan: Plan, arrays: dict[str, Array]) -> int:
        """Returns the index of the fastest plan, timed on `arrays`: plans write all of the outputs and read none."""
        graph = plan.graph
        usable: list[int] = []
        for index in range(graph.get_execution_plan_count()):
            if len(usable) == _CANDIDATES:
                break
            try:
                graph.build_plan_at_index(index)
            except (RuntimeError, ValueError, self._cudnn.cudnnGraphNotSupportedError):
                continue  # barred by `_restrict`, or not for this card
            if graph.get_workspace_size_plan_at_index(index) <= _WORKSPACE_BYTES:
                usable.append(index)
        if not usable:
            raise RuntimeError("none of the heuristic's can be built")
        needed = max(graph.get_workspace_size_plan_at_index(i) for i in usable)
        workspace, pointers = self._cupy.empty(max(1, needed), "uint8"), plan.pointers(arrays)
        run = partial(graph.execute_plan_at_index, pointers, workspace.data.ptr, handle=self._handle)
        return usable[self._autotuner.fastest([partial(run, index=i) for i in usable])]

    def _restored(self, key: tuple[Any, ...], kept: bytes | None) -> Plan | None:
        """Returns a plan from disk, if cuDNN takes it.

        To deserialise a plan cuDNN captures its stream, so that is a side stream on which no other thread queues work.
        """
        if kept is None:
            return None
        head, _, data = kept.partition(b"\n")
        graph = self._cudnn.pygraph(handle=self._handle)
        try:
            self._cudnn.set_stream(handle=self._handle, stream=self._aside.ptr)
            graph.deserialize(self._handle, list(data))
        except (RuntimeError, ValueError, self._cudnn.cudnnGraphNotSupportedError) as e:
            _LOG.warning("the plan kept for %s is refused by cuDNN (%s); it is made anew", key, e)
            return None
        finally:
            self._cudnn.set_stream(handle=self._handle, stream=self._stream.ptr)
        return Plan(graph, json.loads(head))

    def _restrict(self, graph: Any, dtype: DType, kind: str) -> None:
        """Bars plans that compute fp32 in less than fp32, or TF32 if that is allowed; and for determinism those that
        add in varying order.
        """
        notes = self._cudnn.numerical_note
        barred = []
        if dtype == float32:
            barred += [notes.DOWN_CONVERT_INPUTS, notes.WINOGRAD]
            if mode().float32_precision == "highest":
                barred.append(notes.TENSOR_CORE)
        if mode().deterministic and not kind.startswith("sdpa"):
            barred.append(notes.NONDETERMINISTIC)
        if barred:
            graph.deselect_numeric_notes(barred)


def _most_bytes(key: tuple[Any, ...], arrays: dict[str, Array]) -> int:
    """Returns what a plan may work in; 0 for attention's gradients, which write scores down: any."""
    if key[0].startswith("sdpa"):
        return 0
    return max(_LEAST_LIMIT, _OF_OPERANDS * sum(int(a.nbytes) for a in arrays.values()))


def _counts(lengths: Array | None) -> dict[str, Array]:
    """What `lengths` of `attention_forward` says of queries and of keys, each (B, 1, 1, 1); nothing for None."""
    return {} if lengths is None else {f"len_{of}": lengths[i].reshape(-1, 1, 1, 1) for i, of in enumerate(("q", "kv"))}


def _padding(layouts: dict[str, Layout], declare: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of cuDNN's attention for the lengths among what is laid out."""
    given = {
        f"seq_{name}": declare(name, layouts[name], dtype=int32) for name in ("len_q", "len_kv") if name in layouts
    }
    return {"use_padding_mask": True, **given} if given else {}
