"""A residual network (arXiv 1512.03385, section 4.2) on CIFAR-10's own files: resnet_cifar.py FOLDER --device cuda"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.errors import FlameError

Data = tuple[np.ndarray, np.ndarray]  # images (N, 32, 32, 3) uint8, classes (N,) int64
MEAN, STD = np.float32([0.4914, 0.4822, 0.4465]), np.float32([0.2470, 0.2435, 0.2616])


class Block(nn.Module):
    """Two convolutions around a residual; a third convolution carries that where the shape changes."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        self.conv1, self.bn1 = nn.Conv2d(inside, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(inside, out, 1, stride, bias=False) if inside != out else None

    def forward(self, x: flame.Tensor) -> flame.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + (self.short(x) if self.short else x))


class ResNet(nn.Module):
    """ResNet-(6 n + 2): three stages of n blocks, 16 w, 32 w and 64 w channels wide."""

    def __init__(self, n: int = 3, w: int = 2) -> None:
        self.conv, self.bn = nn.Conv2d(3, 16 * w, 3, padding=1, bias=False), nn.BatchNorm2d(16 * w)
        widths = [16 * w, *(16 * w << stage for stage in range(3) for _ in range(n))]
        self.blocks = nn.ModuleList([Block(i, o, 1 + (i != o)) for i, o in pairwise(widths)])
        self.fc = nn.Linear(widths[-1], 10)

    def forward(self, x: flame.Tensor) -> flame.Tensor:
        x = F.relu(self.bn(self.conv(x)))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((1, 2)))


def cifar10(folder: Path) -> tuple[Data, Data]:
    """The "binary version": records of one class byte and 3072 pixel bytes, colours one after another.

    The folder is that of the files, or the one into which the archive was unpacked.
    """
    unpacked = folder / "cifar-10-batches-bin"
    folder = unpacked if unpacked.is_dir() else folder

    def read(names: list[str]) -> Data:
        if missing := [n for n in names if not (folder / n).exists()]:
            pickled = "; these are pickles, take the binary version" if (folder / "batches.meta").exists() else ""
            raise SystemExit(f"{folder}: expected CIFAR-10's binary files; not there: {', '.join(missing)}{pickled}")
        if bad := [n for n in names if not (size := (folder / n).stat().st_size) or size % 3073]:
            raise SystemExit(f"{folder}: {', '.join(bad)}: damaged, no whole number of images; get another copy")
        rows = np.concatenate([np.fromfile(folder / n, np.uint8).reshape(-1, 3073) for n in names])
        if rows[:, 0].max() > 9:
            raise SystemExit(f"{folder}: class {rows[:, 0].max()}: expected 0 to 9; these are not CIFAR-10's files")
        return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0].astype(np.int64)

    return read([f"data_batch_{i}.bin" for i in range(1, 6)]), read(["test_batch.bin"])


def batch_of(data: Data, rows: np.ndarray, device: str, rng: np.random.Generator | None = None) -> list[flame.Tensor]:
    """Normalised images and classes; with `rng` all are shifted by up to 4 pixels and half of them mirrored."""
    x = (data[0][rows] / np.float32(255) - MEAN) / STD
    if rng is not None:
        x[::2] = x[::2, :, ::-1]
        dy, dx = rng.integers(0, 9, 2)
        x = np.pad(x, ((0, 0), (4, 4), (4, 4), (0, 0)))[:, dy : dy + 32, dx : dx + 32]
    return [flame.tensor(a, device=device) for a in (x, data[1][rows])]


def accuracy(model: ResNet, data: Data, device: str) -> float:
    right = 0.0
    model.eval()
    with flame.no_grad():
        for rows in np.array_split(np.arange(len(data[1])), -(-len(data[1]) // 500)):
            x, y = batch_of(data, rows, device)
            right += (F.argmax(model(x), dim=1) == y).float().sum().item()
    return right / len(data[1])


def train(seen: Data, unseen: Data, model: ResNet, epochs: int, device: str, batch: int = 128) -> float:
    """SGD with momentum; the rate falls along a cosine. Returns the accuracy on unseen images."""
    model.init(np.random.default_rng(0), device=device)
    steps, rng = len(seen[1]) // batch, np.random.default_rng(0)
    schedule = optim.Schedule("cosine", total=epochs * steps, warmup=min(100, steps))
    trained, rule = optim.FlatParameters(model.requires_grad_().parameters()), optim.SGDRule(0.9, 0.0, 5e-4, True)
    optimizer = optim.Optimizer(trained, [rule], lr=0.1, schedule=schedule)
    for epoch in range(epochs):
        for rows in rng.permutation(len(seen[1]))[: steps * batch].reshape(steps, batch):
            x, y = batch_of(seen, rows, device, rng)
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {accuracy(model, unseen, device):.2%} of the unseen images right")
    return accuracy(model, unseen, device)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="CIFAR-10, the binary version")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    try:
        train(*cifar10(args.folder), ResNet(), epochs=args.epochs, device=args.device)
    except FlameError as e:  # no GPU, for one
        parser.exit(e.exit_code, f"{e}\n")
