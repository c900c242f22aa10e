"""What a module's tensors are as a whole: saved and restored by name, moved, printed, told that training is over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from ...errors import ModelFileError
from ..autograd.versions import VERSIONS
from ..backend import get_backend, owner
from ..dtype import DType, as_dtype, is_float
from ..mode import mode
from ..tensors.tensor import Parameter, host_array
from .quantized import QuantizedWeight
from .spec import ParamSpec, kernel_order


def check_shapes(declared: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Raises `ModelFileError` listing every missing, unexpected and mis-shaped tensor of the component `what`."""
    missing = [n for n in declared if n not in found]
    unexpected = [n for n in found if n not in declared]
    wrong = [n for n in declared if n in found and tuple(found[n]) != declared[n]]
    if not (missing or unexpected or wrong):
        return
    lines = [f"{what}: the weights do not fit the model"]
    lines += _listed("missing", missing, lambda n: f"{n}{_near(n, unexpected)}")
    lines += _listed("unexpected", unexpected, lambda n: n)
    lines += _listed("mis-shaped", wrong, lambda n: f"{n}: expected {declared[n]}, found {tuple(found[n])}")
    raise ModelFileError("\n".join(lines))


def _near(name: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches  # only when something is wrong: it takes as long to import as a layer

    match = get_close_matches(name, names[:2000], n=1, cutoff=0.85)
    return f" (the file has {match[0]})" if match else ""


def _listed(title: str, names: Sequence[str], show: Any) -> list[str]:
    if not names:
        return []
    rest = [f"    ... and {len(names) - 5} more"] if len(names) > 5 else []
    return [f"  {title}: {len(names)}", *(f"    {show(n)}" for n in names[:5]), *rest]


class Unfitted(NamedTuple):
    """What `load_state_dict` left out with strict=False: names the state lacks, and names the module does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ModuleState:
    """The part of a `Module` that treats all its tensors alike."""

    training: bool = True

    def named_specs(self) -> Iterator[tuple[str, Any, str, ParamSpec]]:
        """Every declared weight and buffer: its checkpoint name, its module, its attribute and its declaration."""
        raise NotImplementedError

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """This module and every part below it, with dotted names; this one's is `prefix`."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Every loaded weight and buffer by checkpoint name: the tensors themselves. As torch.nn.Module.state_dict.

        `flame.save(model.state_dict(), path)` writes them to a file.
        """
        return {name: getattr(module, attr) for name, module, attr, _ in self.named_specs()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Unfitted:
        """Copies tensors or arrays of `state` into the weights and buffers of their names.

        What is loaded keeps its device and dtype; what is not becomes a tensor on the default device, in the state's
        dtype. With `strict` raises `ModelFileError` listing what is missing, unexpected or mis-shaped before anything
        is written. Without, what does not fit by name is left out and returned. Raises TypeError for 8-bit weights.
        """
        declared = {name: spec.shape for name, _, _, spec in self.named_specs()}
        given = {name: host_array("load_state_dict", name, value) for name, value in state.items()}
        missing, unexpected = [n for n in declared if n not in given], [n for n in given if n not in declared]
        common = {n: a.shape for n, a in given.items() if strict or n in declared}
        check_shapes({n: s for n, s in declared.items() if strict or n in given}, common, type(self).__name__)
        for name, module, attr, spec in self.named_specs():
            if name in given:
                _write(module, attr, spec, given[name], name)
        return Unfitted(missing, unexpected)

    def to(self, device: str | DType | None = None, dtype: str | DType | None = None) -> Self:
        """Moves every tensor to `device`, and casts the frozen weights to `dtype`: `to("cuda")`, `to("cuda", "bf16")`.

        Trained weights stay the same objects in fp32, and buffers keep their dtype. Raises RuntimeError for weights
        that an optimizer has packed into its buffer: move the model before the optimizer is made; TypeError where
        trained weights would be cast.
        """
        if dtype is None and device is not None and not _names_device(device):
            device, dtype = None, device
        wanted = None if dtype is None else as_dtype(dtype)
        if wanted is not None and not is_float(wanted):
            raise TypeError(f"to: expected a floating dtype for a module, got {wanted.name}")
        where = None if device is None else str(device)
        specs = list(self.named_specs())
        for name, module, attr, _ in specs:
            _check_movable(name, getattr(module, attr), where, wanted)
        moved: dict[int, tuple[Any, Any]] = {}
        for _, module, attr, spec in specs:
            before = getattr(module, attr)
            if id(before) not in moved:
                moved[id(before)] = before, _moved(before, where, None if spec.is_buffer else wanted)
            module.put_weight(attr, moved[id(before)][1])
        return self

    def train(self, mode: bool = True) -> Self:
        """Tells every part that training goes on, or with False that it does not. As torch.nn.Module.train."""
        for _, module in self.named_modules():
            module.training = mode
        return self

    def eval(self) -> Self:
        """Tells every part that training is over: batch norms use their running statistics."""
        return self.train(False)

    def __repr__(self) -> str:
        """Returns the module's parts, one a line, with what they were made with and the shapes of their weights."""
        said = [f"{n}={v}" for n, v in vars(self).items() if n != "training" and not n.startswith("_") and _plain(v)]
        own = ", ".join([*said, *(f"{attr} {spec.shape}" for attr, spec in vars(self)["_specs"].items())])
        parts = [(n, p) for n, p in vars(self).items() if isinstance(p, ModuleState) or (n.isdecimal() and callable(p))]
        lines = [f"({name}): {part!r}" for name, part in parts]
        if not lines:
            return f"{type(self).__name__}({own})"
        body = "\n".join([own, *lines] if own else lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {body}\n)"


def _plain(value: Any) -> bool:
    """Tells whether it is a number or a word, or a few of them."""
    return isinstance(value, int | float | str) or (isinstance(value, tuple) and all(map(_plain, value)))


def _names_device(target: str | DType) -> bool:
    return isinstance(target, str) and target.partition(":")[0] in ("cpu", "cuda")


def _write(module: Any, attr: str, spec: ParamSpec, host: np.ndarray[Any, Any], name: str) -> None:
    there = vars(module).get(attr)
    if isinstance(there, QuantizedWeight):
        raise TypeError(f"load_state_dict: {name} is stored in fewer bits; load the model from a file")
    if there is None:
        made = get_backend(mode().device).to_device(kernel_order(host.astype(spec.dtype or host.dtype)))
        module.put_weight(attr, spec.placed(made))
        return
    for t in (there, there._compute_copy) if isinstance(there, Parameter) else (there,):
        if t is not None:
            t.backend.write(t.data, host.astype(t.dtype, copy=False))
            VERSIONS.mark_written(t.data)


def _check_movable(name: str, weight: Any, device: str | None, dtype: DType | None) -> None:
    if not isinstance(weight, Parameter):
        return
    if dtype is not None and dtype != weight.dtype:
        raise TypeError(
            f"to: {name} is trained, in fp32; cast before requires_grad_(), or compute in {dtype.name} by "
            f"optim.FlatParameters(..., compute_dtype={dtype.name!r})"
        )
    packed = owner(weight.data).nbytes != weight.nbytes
    if packed and device is not None and get_backend(device) is not weight.backend:
        raise RuntimeError(f"to: {name} is in an optimizer's buffer; move the model before its optimizer is made")


def _moved(weight: Any, device: str | None, dtype: DType | None) -> Any:
    """Returns the weight elsewhere or in another dtype; trained ones stay the same object."""
    if isinstance(weight, QuantizedWeight):
        return weight.to(device or weight.device)
    device = device or weight.device
    moved = weight.detach().to(device, dtype if dtype is not None else weight.dtype)
    if isinstance(weight, Parameter):
        weight.data = moved.data
        if weight._grad is not None:
            weight._grad = weight._grad.to(device)
        return weight
    return weight if moved.data is weight.data else type(weight)(moved.data)
