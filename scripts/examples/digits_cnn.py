"""A small convolutional network reads handwritten digits.

python scripts/examples/digits_cnn.py                    scikit-learn's 1797 digits, 8 x 8 pixels
python scripts/examples/digits_cnn.py --mnist FOLDER     MNIST's own four IDX files, gzipped or not
"""

from __future__ import annotations

import argparse
import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.errors import FlameError

Data = tuple[np.ndarray, np.ndarray]  # images (N, H, W, 1) fp32 in 0..1, digits (N,) int64


class CNN(nn.Module):
    """Two convolutions, each halving the image, then two linear layers. Images are channels-last: (B, H, W, C)."""

    def __init__(self, side: int) -> None:
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc1 = nn.Linear(64 * (side // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: flame.Tensor) -> flame.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, layout="NHWC")
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, layout="NHWC")
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def sklearn_digits() -> tuple[Data, Data]:
    """Scikit-learn's handwritten digits, shuffled: the last 360 are for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("scikit-learn holds these digits: pip install scikit-learn, or use --mnist FOLDER") from None
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = (found.images[order, ..., None] / 16).astype(np.float32), found.target[order].astype(np.int64)
    return (x[:-360], y[:-360]), (x[-360:], y[-360:])


def mnist(folder: Path) -> tuple[Data, Data]:
    """MNIST from its IDX files: a header of big-endian numbers, then one byte a pixel or label."""

    def read(name: str, dims: int) -> np.ndarray:
        path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
        if path is None:
            raise SystemExit(f"{folder}: expected MNIST's {name} or {name}.gz; it is not there")
        try:
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            magic, *shape = struct.unpack_from(f">{1 + dims}I", raw)
            if magic != 0x800 + dims:
                raise ValueError(f"no bytes in {dims} dims")
            return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)
        except (OSError, EOFError, zlib.error, struct.error, ValueError) as e:
            raise SystemExit(f"{path}: damaged ({e}); get another copy") from None

    def part(name: str) -> Data:
        x, y = read(f"{name}-images-idx3-ubyte", 3), read(f"{name}-labels-idx1-ubyte", 1)
        if len(x) != len(y):
            raise SystemExit(f"{folder}: {name}: {len(x)} images and {len(y)} digits; get another copy")
        return x[..., None].astype(np.float32) / 255, y.astype(np.int64)

    return part("train"), part("t10k")


def accuracy(model: CNN, data: Data, device: str, batch: int = 1000) -> float:
    right = 0.0
    with flame.no_grad():
        for i in range(0, len(data[1]), batch):
            x, y = (flame.tensor(a[i : i + batch], device=device) for a in data)
            right += (F.argmax(model(x), dim=1) == y).float().sum().item()
    return right / len(data[1])


def train(seen: Data, unseen: Data, epochs: int = 10, device: str = "cpu", verbose: bool = True) -> float:
    """The accuracy on unseen digits after some passes over the seen ones."""
    model = CNN(side=seen[0].shape[1])
    model.init(np.random.default_rng(0), device=device)
    batch, rng = 64, np.random.default_rng(0)
    steps = len(seen[1]) // batch
    schedule = optim.Schedule("cosine", total=epochs * steps, warmup=20)
    arena = optim.FlatParameters(model.requires_grad_().named_parameters())
    optimizer = optim.Optimizer(arena, [optim.AdamWRule(weight_decay=0.05)], lr=2e-3, schedule=schedule)
    for epoch in range(epochs):
        for rows in rng.permutation(len(seen[1]))[: steps * batch].reshape(steps, batch):
            x, y = (flame.tensor(a[rows], device=device) for a in seen)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if verbose:
            right = accuracy(model, unseen, device)
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, unseen digits right: {right:.2%}")
    return accuracy(model, unseen, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, help="the folder with MNIST's files")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    seen, unseen = mnist(args.mnist) if args.mnist else sklearn_digits()
    try:
        train(seen, unseen, args.epochs, device=args.device)
    except FlameError as e:  # no GPU, for one
        parser.exit(e.exit_code, f"{e}\n")
