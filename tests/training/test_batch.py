"""A batch has the same values on the device whichever way it came."""

import numpy as np

from flame_train.engine.backend import get_backend
from flame_train.engine.dtype import bfloat16
from flame_train.training.batch import Batch, HostBatch, sender


def host(seed):
    rng = np.random.default_rng(seed)
    arrays = {
        "mean": rng.standard_normal((2, 4, 4, 4)).astype(np.float32),
        "logvar": rng.standard_normal((2, 4, 4, 4)).astype(np.float32),
        "context": rng.standard_normal((2, 7, 8)).astype(np.float32),
        "time_ids": rng.integers(0, 1024, (2, 6)).astype(np.int32),
    }
    return HostBatch(arrays, seed, np.array([4, 5]), ("a.png", "b.png"))


def test_sent_ahead_or_not():
    backend = get_backend("cpu")
    send = sender(backend, bfloat16)
    plain, ahead = (Batch(host(0), backend, bfloat16) for _ in range(2))
    for seed in range(4):
        sent = send(host(seed))
        sent.arrays["mean"][...] = np.nan  # the upload does not look back
        plain.fill(host(seed))
        ahead.fill(sent)
        for a, b in zip(plain.latents(), ahead.latents(), strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        assert {n: t.dtype for n, t in ahead.conditioning().items()} == {"context": bfloat16, "time_ids": np.int32}
        for name, t in plain.conditioning().items():
            np.testing.assert_array_equal(t.numpy(), ahead.conditioning()[name].numpy())
        assert (int(ahead.step), ahead.samples.tolist(), ahead.size) == (seed, [4, 5], 2)
