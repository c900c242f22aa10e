"""A network of two layers learns to tell two spirals apart. For PyTorch users: read this first.

python scripts/examples/mlp.py
"""

from __future__ import annotations

import argparse

import numpy as np

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import nn, optim
from flame_train.errors import FlameError


class MLP(nn.Module):
    """As in PyTorch, without super().__init__(). `init` fills the weights, `requires_grad_` makes them trainable."""

    def __init__(self, hidden: int = 64) -> None:
        self.first = nn.Linear(2, hidden)
        self.second = nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 2)

    def forward(self, x: flame.Tensor) -> flame.Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (count, 2) fp32 on two noisy spirals, and which one each is on (count,)."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, 2, count)
    turn = np.sqrt(rng.random(count)) * 3 * np.pi
    angle = turn + np.pi * which
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) / 10
    return (points + rng.normal(0, 0.02, points.shape)).astype(np.float32), which


def accuracy(model: MLP, x: flame.Tensor, y: flame.Tensor) -> float:
    with flame.no_grad():
        return (F.argmax(model(x), dim=1) == y).float().mean().item()


def train(steps: int = 800, batch: int = 128, device: str = "cpu", verbose: bool = True) -> tuple[list[float], float]:
    """The loss at each step, and the accuracy on points that were never seen."""
    x, y = (flame.tensor(a, device=device) for a in spirals(4096, seed=0))
    unseen = [flame.tensor(a, device=device) for a in spirals(1024, seed=1)]

    model = MLP()
    model.init(np.random.default_rng(0), device=device)
    model.requires_grad_()
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)

    rng, losses = np.random.default_rng(2), []
    for step in range(steps):
        rows = flame.tensor(rng.integers(0, len(x), batch), device=device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if verbose and (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}, unseen points right: {accuracy(model, *unseen):.1%}")
    return losses, accuracy(model, *unseen)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=800)
    args = parser.parse_args()
    try:
        train(args.steps, device=args.device)
    except FlameError as e:  # no GPU, for one
        parser.exit(e.exit_code, f"{e}\n")
