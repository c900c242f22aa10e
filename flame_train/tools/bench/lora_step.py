"""Times a real LoRA step of a full-size model with random weights, on any card."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np

from flame_train.adapters.attach import attach
from flame_train.adapters.kinds import ADAPTERS
from flame_train.config.load import from_options, with_overrides
from flame_train.distributed.group import ALONE, ProcessGroup, simulated_group
from flame_train.engine import Frozen, capture, nn
from flame_train.engine.backend import Backend, check_formats, get_backend
from flame_train.engine.dtype import DType, as_dtype
from flame_train.engine.mode import deterministic
from flame_train.engine.shape_run import gpu_of, shape_run
from flame_train.errors import ConfigError, EnvironmentFault, out_of_memory
from flame_train.models.common.control import by_name
from flame_train.models.common.model import Denoiser, Model
from flame_train.networks.block_network import BlockNetwork, Checkpointing, whole_blocks
from flame_train.networks.block_offload import StreamedWeights
from flame_train.run.check.adapted_layers import adapted_layers, blocks_named, blocks_streamed
from flame_train.run.check.check_run import storage_of
from flame_train.run.train.step_state import make_state
from flame_train.training.batch import Batch, HostBatch
from flame_train.training.session import Session
from flame_train.training.step import State, micro, reduce, update

from .models import conditioning, find, normal, running_encoders, uniform, with_token_ids
from .timing import ABOUT_THE_REST, breakdown, ceilings, count_launches

_WARM, _TIMED = 3, 10
_FEW = 1, 3  # on a CPU, whose steps take seconds; as many as of PyTorch's
SMALLER = "try --batch 1, --checkpointing full, a lower --resolution or --rank, or --quantize fp8"
"""What to do where memory runs out."""


@dataclass(frozen=True, slots=True)
class BenchCase:
    """The configuration of a measurement: model, pixels, images a step, training settings."""

    model: str = "sdxl"
    resolution: int = 1024
    batch: int = 1
    rank: int = 16
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    checkpointing: Checkpointing = "off"
    device: str = "cuda"
    deterministic: bool = True
    quantize: Literal["off", "fp8", "int8", "int8-convrot", "nf4"] = "off"
    arithmetic: Literal["bf16", "fp8", "int8"] = "bf16"
    checkpoint_blocks: Sequence[str] = ()
    optimizer: str = "adamw"
    settings: Sequence[str] = ()
    """Keys of a config, as `--set` has them: what no option is for, such as the kind of adapter."""
    height: int | None = None
    """Of images that are no squares, whose width `resolution` is."""

    @property
    def bucket(self) -> tuple[int, int]:
        return self.height or self.resolution, self.resolution

    @property
    def storage(self) -> nn.Storage | None:
        """How the engine stores the base."""
        return storage_of(self.quantize, self.arithmetic)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model with adapters, an optimizer and a batch on the device, ready to step.

    `ready` is the bytes in use before the first: all of that, and on the CPU the rest of the process.
    """

    model: Model
    network: Any
    state: State
    batch: Batch
    backend: Backend
    adapted: int
    ready: int
    frozen_bytes: int

    def step(self) -> None:
        """Makes the whole step: noise, timesteps, forward, loss, backward, sum over processes, clip, AdamW."""
        micro(self.state, self.batch)
        reduce(self.state)
        update(self.state)

    def captured(self) -> Callable[[], None]:
        """Returns the step as one device program, recorded."""
        replay = capture(self.step, self.backend.name)
        replay()
        replay()
        return replay


def prepare(case: BenchCase, group: ProcessGroup = ALONE) -> Prepared:
    """Returns a step with random weights, made on the device. Raises `ConfigError` for settings that allow no step.

    Of several processes in `group` each makes its own, with its share of the samples.
    """
    family, model = find(case.model)
    options: dict[str, dict[str, Any]] = {
        "train": {"precision": case.precision, "steps": 100},
        "lora": {"rank": case.rank, "alpha": float(case.rank), "targets": (family.bench_targets,)},
        "data": {"resolution": case.resolution, "batch_size": case.batch},
        "gradient": {"checkpointing": case.checkpointing},
        "optimizer": {"name": case.optimizer},
        "model": {"quantize": case.quantize, "arithmetic": case.arithmetic},
    }
    config = from_options(**with_overrides(options, case.settings))
    for option, side in zip(("--resolution", "--height"), case.bucket[::-1], strict=True):
        if side % model.side_multiple:
            raise ConfigError(f"{option}: expected a multiple of {model.side_multiple} for {case.model}, got {side}")
    backend, dtype = get_backend(case.device), as_dtype(case.precision)
    network = model.network
    recomputed = _checkpointed(network, case)
    network.checkpoint_blocks(case.checkpointing, recomputed)
    streamed = blocks_streamed(network, config.model.offload, case.checkpointing, recomputed)
    check_formats(case.device, {"--precision": dtype})
    if case.storage is not None:
        case.storage.check(case.device, dtype)
    waiting = StreamedWeights(network, streamed, backend) if streamed else None
    randomise(network, dtype, backend, case.storage, waiting)
    if waiting is not None:
        waiting.begin()
    trained = config.text_encoders.train
    running = running_encoders(model, trained, case.checkpointing, lambda text: randomise(text, dtype, backend))
    denoiser = replace(Denoiser.of(model, network, case.device, 1.0), text=running)
    layers = adapted_layers(config.lora, config.text_encoders, model)
    attached = attach(
        denoiser.networks(trained),
        list(layers),
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        seed=0,
        kind=ADAPTERS.chosen(config.lora),
        settings=layers,
    )
    state = make_state(denoiser, attached, config, Session(case.device, group), layers)
    for parameter in attached.parameters():  # a zero matrix would leave half of the gradients zero
        if not bool(parameter.data.any()):
            parameter.data[...] = uniform(backend, 1, parameter.shape, 1e-3, as_dtype("fp32"))
    state.optimizer.arena.sync_copies()
    frames = max(config.data.frames, default=1)
    if problem := model.vae.frames_problem(frames):
        raise ConfigError(f"data.frames: {problem}")
    host = random_batch(model, case, controls=len(config.data.control), frames=frames)
    host = replace(host, arrays=with_token_ids(host.arrays, running)) if running else host
    host = replace(host, samples=host.samples + group.rank * case.batch)
    device_batch = Batch(host, backend, dtype)
    device_batch.fill(host)
    frozen = sum(int(w.nbytes) for each in (network, *(r.network for r in running)) for _, w in each.weights())
    return Prepared(model, network, state, device_batch, backend, len(layers), backend.memory().live, frozen)


def _checkpointed(network: BlockNetwork, case: BenchCase) -> frozenset[str]:
    """Returns the blocks that are checkpointed. Raises `ConfigError` if the model has none."""
    if case.checkpoint_blocks and case.checkpointing == "off":
        raise ConfigError("--checkpoint-blocks: expected --checkpointing with it")
    return blocks_named(network, case.checkpointing, case.checkpoint_blocks, "--checkpoint-blocks")


@out_of_memory(SMALLER)
def step(
    case: BenchCase, against: Literal["torch", "torch-compiled"] | None = None, by_kind: bool = False
) -> dict[str, Any]:
    """Times a whole training step with random weights, eager and, on a GPU, replayed as a captured graph.

    Returns median milliseconds, the host's share of them, peak GiB (None if unknown), and the last step's metrics. On
    a GPU it adds the arithmetic and its share of the card's rate in a large matrix product. `by_kind` adds the time
    by kind of kernel, `against` PyTorch's times. Raises `ConfigError` and `EnvironmentFault` before it measures.
    """
    if against is not None:
        check_counterpart(case)
    with deterministic(case.deterministic):
        result = _step(case, by_kind)
    if against is None:
        return result
    theirs = torch_step(case, against == "torch-compiled")
    best = result.get("captured_ms", result["eager_ms"])
    return result | {"torch": theirs, "ratio": round(best / theirs["ms"], 4)}


def check_counterpart(case: BenchCase) -> None:
    """Raises `ConfigError` for what PyTorch's step would not do likewise, `EnvironmentFault` if it is not installed."""
    lacking = [f"--quantize {case.quantize}"] if case.quantize != "off" else []
    lacking += [f"--checkpointing {case.checkpointing}"] if case.checkpointing not in ("off", "full") else []
    lacking += ["--checkpoint-blocks"] if case.checkpoint_blocks else []
    baseline = _baseline(case) if case.settings else None
    can = {"data.control": baseline and baseline.with_controls, "data.frames": baseline and baseline.with_frames}
    keys = {setting: setting.partition("=")[0] for setting in case.settings}
    lacking += [f"--set {setting}" for setting, key in keys.items() if not can.get(key)]
    if case.height and "data.frames" not in keys.values():
        lacking.append(f"--height {case.height} without data.frames")
    if lacking:
        raise ConfigError(f"--against: PyTorch's step has no counterpart of {' and '.join(lacking)}; leave one out")
    from_checkout("torch_lora_step", "bench step --against").check_installed()


def from_checkout(module: str, command: str) -> ModuleType:
    """Imports a module of `benchmarks/`, the folder beside the package that the wheel leaves out.

    Raises EnvironmentFault, which names the `command`, where the package is no checkout.
    """
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / f"{module}.py").is_file():
        raise EnvironmentFault(
            f"{command}: expected a checkout of the repository, whose benchmarks/ it runs; this flame-train is "
            "installed without it: clone the repository and `pip install -e .` there"
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
    return importlib.import_module(f"benchmarks.{module}")


def torch_step(case: BenchCase, compiled: bool, group: ProcessGroup = ALONE) -> dict[str, Any]:
    """PyTorch's times for the step of the same model, eager or with compiled blocks; its DDP in several processes."""
    get_backend(case.device).empty_cache()
    baseline = _baseline(case)
    data = from_options(**with_overrides({}, case.settings)).data
    baseline = baseline.with_controls(len(data.control)) if data.control else baseline
    baseline = baseline.with_frames(max(data.frames), case.height) if data.frames else baseline
    asked = case.resolution, case.batch, case.rank, case.precision
    return from_checkout("torch_lora_step", "bench step --against").run(
        baseline, *asked, whole_blocks(case.checkpointing), case.device, compiled, group
    )


def _baseline(case: BenchCase) -> Any:
    """Returns PyTorch's counterpart of the model."""
    return from_checkout("torch_baseline", "bench step --against").torch_baseline(find(case.model)[1])


def _step(case: BenchCase, by_kind: bool) -> dict[str, Any]:
    get_backend(case.device).empty_cache()  # what an earlier case's graph kept
    begin = time.monotonic()
    p = prepare(case)
    p.backend.reset_peak()
    p.step()
    p.backend.synchronize()
    first = time.monotonic() - begin
    eager = _time(p.step, p.backend, *(_FEW if case.device == "cpu" else (_WARM, _TIMED)))
    result = asdict(case) | {
        "adapted_layers": p.adapted,
        "trainable_parameters": p.state.optimizer.arena.count,
        "first_step_s": round(first, 2),
        "eager_ms": eager[0],
        "eager_host_ms": eager[1],
        "weights_gib": gib(p.frozen_bytes),
        "before_step_gib": gib(p.ready),
        **({"host_gib": gib(p.backend.host_bytes)} if p.backend.host_bytes else {}),
        "peak_gib": peak_gib(p.backend),
    }
    if case.device != "cpu":
        foretold = predicted(case)
        return result | {"predicted_gib": gib(foretold.peak)} | _on_gpu(p, foretold.flops, by_kind)
    return result | {"figures": _figures(p)}


def _on_gpu(p: Prepared, flops_of: Mapping[str, int], by_kind: bool) -> dict[str, Any]:
    """Returns the measurements of the captured step. `flops_of` is its arithmetic, by kind of kernel."""
    counted = count_launches(p.step, p.backend) if by_kind else {}
    replay = p.captured()
    p.backend.reset_peak()
    ms, host_ms = _time(replay, p.backend)
    peak = peak_gib(p.backend)
    limits = ceilings(p.backend, p.state.dtype)
    result: dict[str, Any] = {"captured_ms": ms, "captured_host_ms": host_ms, "captured_gib": peak}
    result |= _share(sum(flops_of.values()), ms, limits.flops) | {"figures": _figures(p)}
    if by_kind:  # last, for it leaves no step that means something
        top = limits.flops, limits.bandwidth
        kernels = breakdown(p.step, p.backend, counted, flops_of, top, lambda f: _time(f, p.backend, 1, 3)[0])
        result |= {"kernels": kernels, "the rest is": ABOUT_THE_REST}
    return result


def peak_gib(backend: Backend) -> float | None:
    peak = backend.memory().peak
    return None if peak is None else gib(peak)


def gib(size: int) -> float:
    return round(size / 2**30, 2)


def _figures(p: Prepared) -> dict[str, float]:
    """Returns the metrics of the last step."""
    return dict(zip(p.state.figure_names, p.backend.to_host(p.state.figures).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Predicted:
    """A captured step, run on shapes: its peak bytes on the GPU, and its FLOP by kind of kernel.

    Recomputed products are left out: the floor is that of a step that saves all activations.
    """

    peak: int
    flops: Mapping[str, int]


def predicted(case: BenchCase, processes: int = 1) -> Predicted:
    """Returns the step of a case, run on shapes for this machine's GPU, or an H100 where there is none.

    Of several processes it is one; what NCCL keeps is not counted.
    """
    with shape_run(gpu_of(case.device)) as run, deterministic(case.deterministic):
        p = prepare(replace(case, device="cuda"), simulated_group(processes))
        run.backend.reset_peak()
        flops = run.multiplied(p.step)
        p.captured()
        return Predicted(run.peak_bytes, flops)


def _share(work: float, ms: float, ceiling: float) -> dict[str, Any]:
    """Returns the step's arithmetic, its rate, and that rate over the card's own."""
    rate = work / ms * 1e3
    return {
        "tflop": round(work / 1e12, 3),
        "tflop_per_s": round(rate / 1e12, 3),
        "ceiling_tflop_per_s": round(ceiling / 1e12, 3),
        "share_of_ceiling": round(rate / ceiling, 4),
    }


def _time(fn: Callable[[], None], backend: Backend, warm: int = _WARM, timed: int = _TIMED) -> tuple[float, float]:
    """Returns (milliseconds a call, of those the host's until it was free again), medians over separate calls."""
    whole, host = [], []
    for i in range(warm + timed):
        backend.synchronize()
        begin = time.perf_counter()
        fn()
        queued = time.perf_counter()
        backend.synchronize()
        if i >= warm:
            host.append((queued - begin) * 1e3)
            whole.append((time.perf_counter() - begin) * 1e3)
    return round(statistics.median(whole), 3), round(statistics.median(host), 3)


def randomise(
    module: nn.Module,
    dtype: DType,
    backend: Backend,
    storage: nn.Storage | None = None,
    mover: nn.OffloadOnLoad | None = None,
) -> None:
    """Fills every weight with uniform values of a sensible size, made on the device.

    Args:
        storage, mover: as in `nn.load`.
    """
    specs = list(module.named_specs())
    completion = nn.LoadedParts(module, [layer for _, layer, *_ in specs], backend, mover)
    packed = {} if storage is None else module.quantizable(storage.rotated)
    for number, (_, part, attr, slot) in enumerate(specs):
        if slot.init in ("ones", "zeros"):
            values = backend.xp.full(slot.shape, float(slot.init == "ones"), dtype)
        else:
            bound = (3.0 / max(1, int(np.prod(slot.shape[1:])))) ** 0.5
            values = uniform(backend, number, slot.shape, bound, dtype)
        if values.ndim == 4:
            values = backend.xp.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        part.put_weight(attr, Frozen(values))
        if attr == "weight" and part in packed:
            part.quantize(storage, packed[part])
        completion.after(number)
    completion.end()


def random_batch(
    model: Model, case: BenchCase, bucket: tuple[int, int] | None = None, controls: int = 0, frames: int = 1
) -> HostBatch:
    """Returns a batch of random latents and conditioning of the model's shapes, for images (H, W) if not the case's.

    Each image has so many control images of its size; clips have so many frames.
    """
    shape = (case.batch, *model.vae.latent_shape(bucket or case.bucket, frames))
    latents = {"mean": normal(*shape), "logvar": normal(*shape) - 4.0}
    names = tuple(f"random {i}" for i in range(case.batch))
    seen = conditioning(model, case.bucket, case.batch) | by_name(normal(*shape) for _ in range(controls))
    return HostBatch(latents | seen, 0, np.arange(case.batch), names)
