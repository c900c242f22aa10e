"""The source of random numbers for new tensors: a seed, and a counter of what was drawn with it."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from ..backend import Backend, get_backend
from ..dtype import int64
from ..mode import mode, set_mode
from ..random import Rng


class Generator:
    """A seed and a counter of what was drawn with it, as torch.Generator.

    With a `device` the counter lies there, so that a captured step draws new numbers at each replay. Without, it is a
    Python number, and draws for any device.

    >>> g = Generator(7)
    >>> first, second = randn(2, generator=g), randn(2, generator=g)
    >>> bool((first == randn(2, generator=Generator(7))).tolist() == [True, True])
    True
    """

    def __init__(self, seed: int = 0, device: str | None = None) -> None:
        self.device = device
        self._counter: Any = 0 if device is None else get_backend(device).xp.zeros((), int64)
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> Generator:
        """Starts over with another seed."""
        self.seed = seed_of(seed)
        if self.device is None:
            self._counter = 0
        else:
            self._counter[...] = 0
        return self

    @property
    def counter(self) -> int:
        """How many tensors were drawn since the seed was set; read from the device, if it is there."""
        return int(self._counter if self.device is None else get_backend(self.device).to_host(self._counter))

    @counter.setter
    def counter(self, value: int) -> None:
        if self.device is None:
            self._counter = int(value)
        else:
            self._counter[...] = int(value)

    def next(self, backend: Backend) -> tuple[int, Any]:
        """The seed, and the counter before it goes on by one. Raises RuntimeError for another device than its own."""
        if self.device is None:
            refuse_in_capture("flame.Generator(seed, device=...)")
            self._counter += 1
            return self.seed, self._counter - 1
        if get_backend(self.device) is not backend:
            raise RuntimeError(f"Generator: this one is on {self.device}, the new tensor on {backend.name}")
        before = self._counter.copy()
        self._counter += 1
        return self.seed, before


def manual_seed(seed: int) -> None:
    """Sets the seed of `randn` and its kin in this thread, and starts over. As torch.manual_seed.

    >>> manual_seed(3)
    >>> x = rand(2, 2)
    >>> manual_seed(3)
    >>> bool((x.numpy() == rand(2, 2).numpy()).all())
    True
    """
    set_mode(seed=seed_of(seed), drawn=0)


def next_rng(backend: Backend, samples: int, generator: Generator | None = None, *, instead: str) -> Rng:
    """Returns the numbers of what is drawn next, by the generator or else by `manual_seed`."""
    if generator is not None:
        seed, counter = generator.next(backend)
    else:
        refuse_in_capture(instead)
        seed, counter = mode().seed, mode().drawn
        set_mode(drawn=counter + 1)
    return Rng(backend.xp, seed, counter, backend.xp.arange(samples, dtype=int64))


def refuse_in_capture(instead: str) -> None:
    """Raises RuntimeError in a captured step, and says what to draw with instead."""
    if mode().capturing:
        raise RuntimeError(f"a captured step would draw the same random numbers at each replay: draw with {instead}")


def seed_of(seed: Any) -> int:
    """Returns a seed as a Python int. Raises TypeError for what is no whole number."""
    if not isinstance(seed, Integral):
        raise TypeError(f"a seed: expected an int, got {seed!r}")
    return int(seed)
