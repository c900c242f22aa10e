"""What PyTorch has under another name, or not as a name: the sentence that somebody who writes it is told.

What means the same is there under PyTorch's name; this is for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Hints = Mapping[str, str]

NUMPYS: Final = {"axis": "dim", "axes": "dim", "keepdims": "keepdim"}
"""NumPy's names of arguments, which ops take for PyTorch's."""

UNKNOWN_ARGUMENTS: Final[Hints] = {
    "inplace": "leave it out and use the result, or write x.relu_() where no gradient is wanted",
    "dtype": "cast before: x.to(dtype)",
    "out": "use the result, or write it by y.copy_(...)",
    "device": "move before: x.to(device)",
}

DTYPES: Final[Hints] = {
    **{n: n for n in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")},
    **{n: n for n in ("float8_e4m3fn", "float8_e5m2")},
    **{"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32"},
}
"""The names of PyTorch's dtypes, by which functions take them as well, with those that the engine knows."""

_COPIES = "write flame.tensor(array), which copies"
_NOT_HERE = "it is not here"

FLAME: Final[Hints] = {
    **dict.fromkeys(("from_numpy", "as_tensor", "asarray", "from_dlpack", "FloatTensor", "LongTensor"), _COPIES),
    **dict.fromkeys(("concat", "concatenate"), "write flame.cat"),
    **dict.fromkeys(("mm", "mv"), "write flame.matmul"),
    "normal": "write mean + std * flame.randn(*size)",
    "bernoulli": "write (flame.rand(*size) < p)",
    "randperm": "take numpy.random.default_rng(seed).permutation(n)",
    "compile": "flame.capture(step, device) records a step as one CUDA graph; no code is generated",
    "inference_mode": "write flame.no_grad()",
    "set_grad_enabled": "write flame.enable_grad() or flame.no_grad()",
    "is_grad_enabled": "write flame.mode.mode().grad",
    "is_tensor": "write isinstance(x, flame.Tensor)",
    "device": 'devices are names: "cpu", "cuda", "cuda:1"',
    "cuda": 'devices are names: device="cuda"; `flame-train doctor` says what this machine has',
    "backends": "flame.set_float32_matmul_precision chooses between fp32 and TF32",
    "autocast": 'a tensor\'s dtype is its precision: optim.FlatParameters(..., compute_dtype="bfloat16")',
    "amp": "optim.LossScaler scales the loss, optim.FlatParameters(..., compute_dtype=...) computes in 16 bits",
    "utils": "write flame.checkpoint for utils.checkpoint; any loop over arrays loads data",
    "nan": "write float('nan')",
    "inf": "write float('inf')",
    "pi": "write math.pi",
}

FUNCTIONAL: Final[Hints] = {
    "mm": "write F.matmul",
    "adaptive_max_pool2d": _NOT_HERE,
    "dropout2d": "write F.dropout",
}

NN: Final[Hints] = {
    "Parameter": "declare a weight by nn.param(3, 4), which model.init or nn.load fills",
    "ParameterList": "set weights as attributes: setattr(self, f'weight{i}', nn.param(3, 4))",
    "ModuleDict": "set the parts as attributes, or take an nn.ModuleList",
    "functional": "write flame.functional",
    "init": "nn.param(..., init=...) says how model.init fills a weight",
    "utils": "write optim.clip_grad_norm_ and optim.clip_grad_value_",
    "MSELoss": "call F.mse_loss",
    "L1Loss": "call F.l1_loss",
    "SmoothL1Loss": "call F.smooth_l1_loss",
    "HuberLoss": "call F.huber_loss",
    "CrossEntropyLoss": "call F.cross_entropy",
    "NLLLoss": "call F.nll_loss",
    "KLDivLoss": "call F.kl_div",
    "BCELoss": "call F.binary_cross_entropy",
    "BCEWithLogitsLoss": "call F.binary_cross_entropy_with_logits",
    **dict.fromkeys(("LSTM", "GRU", "RNN", "Conv3d", "BatchNorm3d", "DataParallel"), _NOT_HERE),
    **{
        name: f"it has no weights: call F.{function}, or put a function into nn.Sequential"
        for name, function in {
            "LeakyReLU": "leaky_relu",
            "ELU": "elu",
            "Mish": "mish",
            "Softplus": "softplus",
            "Softmax": "softmax",
            "LogSoftmax": "log_softmax",
            "Hardswish": "hardswish",
            "ReLU6": "relu6",
            "MaxPool2d": "max_pool2d",
            "AvgPool2d": "avg_pool2d",
            "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
            "Upsample": "interpolate",
            "Flatten": "flatten",
            "PixelShuffle": "pixel_shuffle",
            "InstanceNorm2d": "instance_norm",
        }.items()
    },
    "Conv1d": "call F.conv1d with a weight of nn.param",
}

OPTIM: Final[Hints] = {
    "lr_scheduler": "optim.Schedule is a part of optim.Optimizer; optimizer.set('lr', rate) sets a rate of your own",
    "swa_utils": "optim.EMA is a part of optim.Optimizer",
}

OPTIMIZER: Final[Hints] = {
    "param_groups": "optimizer.set('lr', rate) sets the rate; groups are given when it is made",
    "add_param_group": "give all groups when it is made",
    "state": "optimizer.state_dict() has it",
}

TENSOR: Final[Hints] = {
    **dict.fromkeys(("int", "short", "byte", "bool", "char", "type"), 'write x.to("int32"), or another dtype\'s name'),
    "type_as": "write x.to(other.dtype)",
    "expand_as": "write x.expand(other.shape)",
    "view_as": "write x.view(other.shape)",
    "reshape_as": "write x.reshape(other.shape)",
    "dot": "write (x * y).sum()",
    "mm": "write x @ y",
    "mv": "write x @ y",
    "remainder": "write x - x // y * y",
    "retain_grad": "x.register_hook(kept.append) sees the gradient",
    "grad_fn": "flame.trace() lists the ops of backward; x.is_leaf says whether one made it",
    "is_cuda": "write x.device",
    "is_contiguous": "write x.data.flags.c_contiguous",
    "stride": "write x.data.strides, in bytes",
    "element_size": "write x.dtype.itemsize",
    "nonzero": "write x.numpy().nonzero(), on the host",
    "masked_select": "write x.numpy()[mask.numpy()], on the host",
    **{f"new_{n}": f"write flame.{n}(size, dtype=x.dtype, device=x.device)" for n in ("zeros", "ones", "empty")},
    "new_full": "write flame.full(size, value, dtype=x.dtype, device=x.device)",
    "new_tensor": "write flame.tensor(data, x.dtype, x.device)",
    "normal_": "write x.copy_(mean + std * flame.randn_like(x))",
    "uniform_": "write x.copy_(low + (high - low) * flame.rand_like(x))",
}

MODULE: Final[Hints] = {
    **{name: f'write model.to("{name}")' for name in ("cpu", "cuda", "bfloat16")},
    **{
        "half": 'write model.to("float16")',
        "float": 'write model.to("float32")',
        "double": 'write model.to("float64")',
    },
    "register_buffer": "write self.name = nn.buffer(3, 4)",
    "register_parameter": "write self.name = nn.param(3, 4)",
    "register_forward_hook": "override forward, or wrap the part",
    "add_module": "write setattr(self, name, part)",
    "modules": "write model.named_modules(), which gives names too",
    "children": "write model.named_modules(), which gives names too",
    "named_children": "write model.named_modules(), which gives names too",
    "buffers": "model.state_dict() has them",
    "named_buffers": "model.state_dict() has them",
    "apply": "loop over model.named_modules()",
}


def absent(owner: str, name: str, hints: Hints) -> AttributeError:
    """Returns the error for a name that `owner` lacks, with what to write instead if that is known."""
    hint = f": {hints[name]}" if name in hints else ""
    return AttributeError(f"{owner} has no attribute {name!r}{hint}")


def absent_from_tensor(name: str, functions: Hints) -> str:
    """What to write for a method that a Tensor lacks; `functions` are those of `functional` by name; "" if unknown."""
    if name in TENSOR:
        return TENSOR[name]
    base = name.removesuffix("_")
    if base not in functions:
        return ""
    return f"write x.copy_(F.{base}(x))" if name.endswith("_") else f"write F.{name}(x)"
