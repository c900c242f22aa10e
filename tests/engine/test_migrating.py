"""The page for PyTorch users: its names exist, its statements hold, and its two programs compute the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flame_train.engine as flame
from flame_train.engine import functional as F
from flame_train.engine import gradcheck, nn, optim
from flame_train.engine.mode import capturing
from flame_train.errors import ShapeError

PAGE = (Path(__file__).parents[2] / "docs" / "migrating-from-pytorch.md").read_text(encoding="utf-8")


def names(column: int) -> Iterator[str]:
    """Every dotted name in a column of the table."""
    table = PAGE.split("## Names")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]
    return (name for row in rows for name in re.findall(r"`([\w.]+)`", row[column]))


def program(name: str) -> str:
    """The code block that follows the comment `name`."""
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found.group(1)


def run(name: str, **given: Any) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": name, **given}
    exec(compile(program(name), name, "exec"), space)
    return space


def data() -> tuple[np.ndarray, np.ndarray]:
    """Images whose class is their brightest colour and where it is."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 10, 64)
    images = rng.normal(0, 0.3, (64, 8, 8, 3)).astype(np.float32)
    images[np.arange(64), :, :, classes % 3] += (classes // 3)[:, None, None].astype(np.float32)
    return images, classes


def test_every_program_of_the_page_is_run() -> None:
    ran = ["pytorch", "flame-train", "weights", "file"]
    assert re.findall(r"<!-- ([\w-]+) -->\n```python", PAGE) == ran
    assert PAGE.count("```python") == len(ran)


def test_the_names_on_our_side_exist() -> None:
    assert flame.gradcheck is gradcheck  # a module of its own, not imported by the package
    spaces = {"flame": flame, "nn": nn, "optim": optim, "F": F, "x": flame.tensor([1.0]), "model": nn.Linear(1, 1)}
    listed = list(names(1))
    assert len(listed) > 40
    for name in listed:
        root, _, rest = name.partition(".")
        attrgetter(rest)(spaces[root])


def test_the_loop_on_our_side_learns() -> None:
    space = run("flame-train")
    losses = space["train"](space["model"], *data())
    assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:4])


def test_weights_are_kept_in_a_file(tmp_path: Path) -> None:
    model = run("flame-train")["model"]
    saved = dict(model.named_parameters())
    run("file", model=model, path=tmp_path / "net.safetensors", nn=nn)
    loaded = dict(model.named_parameters())
    assert list(loaded) == list(saved)
    for name, weight in loaded.items():
        assert weight is not saved[name]
        np.testing.assert_array_equal(weight.numpy(), saved[name].numpy())


@pytest.mark.parity
def test_the_names_on_pytorchs_side_exist() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.utils.checkpoint")
    spaces = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "x": torch.ones(1), "model": torch.nn.ReLU()}
    for name in names(0):
        root, _, rest = name.partition(".")
        attrgetter(rest)(spaces[root])


@pytest.mark.parity
def test_both_loops_have_the_same_losses() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs, ours = run("pytorch"), run("flame-train")
    state = {name: t.clone() for name, t in theirs["model"].state_dict().items()}
    assert list(state) == [name for name, _ in ours["model"].weights()]
    run("weights", model=ours["model"], state=state)
    np.testing.assert_allclose(
        ours["train"](ours["model"], *data()), theirs["train"](theirs["model"], *data()), rtol=2e-4
    )


class TestWhatDiffers:
    """The statements of the last section, one by one."""

    def test_modules_declare(self) -> None:
        layer = nn.Linear(2, 3)
        with pytest.raises(RuntimeError, match="declared but not loaded"):
            layer.weight  # noqa: B018
        layer.init(np.random.default_rng(0))
        assert isinstance(layer.weight, flame.Frozen)
        layer.requires_grad_()
        assert isinstance(layer.weight, flame.Parameter)

    def test_what_is_trainable_stays_it(self) -> None:
        layer = nn.Linear(2, 3)
        layer.init(np.random.default_rng(0))
        weight = layer.requires_grad_().weight
        layer.requires_grad_(False)
        assert layer.weight is weight
        assert not list(layer.parameters())
        assert not any(hasattr(nn, name) for name in ("MSELoss", "MaxPool2d", "LSTM"))

    def test_how_weights_are_drawn(self) -> None:
        for layer, deviation in (
            (nn.Linear(400, 500), 0.05),
            (nn.Conv2d(16, 100, 5), 0.05),
            (nn.Embedding(99, 99), 0.02),
        ):
            layer.init(np.random.default_rng(0))
            assert layer.weight.numpy().std() == pytest.approx(deviation, rel=0.05)
            assert not any(w.numpy().any() for name, w in layer.weights() if name == "bias")

    @pytest.mark.parity
    def test_how_pytorch_draws_weights(self) -> None:
        torch = pytest.importorskip("torch")
        for p in torch.nn.Linear(400, 5000).parameters():
            assert p.std().item() == pytest.approx(0.05 / np.sqrt(3), rel=0.05)
            assert p.abs().max().item() <= 0.05

    def test_mixed_precision(self) -> None:
        layer = nn.Linear(2, 3)
        layer.init(np.random.default_rng(0))
        optim.FlatParameters(layer.requires_grad_().named_parameters(), compute_dtype="bfloat16")
        x = flame.tensor([[1.0, 2.0]]).to("bfloat16")
        layer(x).sum().backward()
        assert layer(x).dtype == nn.compute_copy(layer.weight).dtype == x.dtype
        assert layer.weight.grad.dtype == layer.weight.dtype == np.float32

    def test_layouts(self) -> None:
        conv = nn.Conv2d(3, 4, 3, padding=1)
        conv.init(np.random.default_rng(0))
        x = flame.tensor(np.random.default_rng(1).standard_normal((2, 5, 5, 3), np.float32))
        first = F.conv2d(x.permute(0, 3, 1, 2), conv.weight, conv.bias, padding=1)
        np.testing.assert_allclose(conv(x).permute(0, 3, 1, 2).numpy(), first.numpy(), rtol=1e-4, atol=1e-5)

    def test_dtypes(self) -> None:
        x = flame.tensor([1.0]).to("bfloat16")
        assert (x + 1.5).dtype == x.dtype
        assert (x + flame.tensor(1.5)).dtype == x.dtype
        assert (x + flame.tensor([1.0])).dtype == np.float32
        for whole in (flame.tensor([1, 2, 4]), flame.tensor([True, False])):
            values = whole.numpy().astype(np.float32)
            assert F.mean(whole).dtype == np.float32
            np.testing.assert_allclose(F.mean(whole).item(), values.mean())
            np.testing.assert_allclose(F.softmax(whole, 0).numpy(), np.exp(values) / np.exp(values).sum(), rtol=1e-6)

    def test_what_is_refused_early(self) -> None:
        x = flame.tensor(np.ones((4, 5, 6), np.float32))
        for loss in (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.kl_div):
            with pytest.raises(ShapeError, match="one shape"):
                loss(x, x[0])
        with pytest.raises(ShapeError, match="expected a 4-D input"):
            F.max_pool2d(x[0], 2)
        assert F.max_pool2d(x, 2).shape == (4, 2, 3)
        with pytest.raises(ShapeError, match=r"weight \(out, in\)"):
            F.linear(x, x[0, 0])
        with pytest.raises(TypeError, match="'dtype' is unknown"):
            F.sum(x, dtype="float64")

    def test_what_is_not_a_number_stays_so(self) -> None:
        x = flame.tensor([np.nan, 2.0], requires_grad=True)
        np.testing.assert_array_equal(F.sign(x).numpy(), [np.nan, 1.0])
        for y in (x.abs(), F.l1_loss(x, flame.tensor([0.0, 0.0]), reduction="sum")):
            np.testing.assert_array_equal(flame.grad(y.sum(), x)[0].numpy(), [np.nan, 1.0])

    def test_random_numbers_are_by_place(self) -> None:
        x = flame.tensor(np.ones((3, 8)))
        made = [F.dropout(x, 0.5, rng=flame.random.Rng(np, 1, 2, np.arange(3))).numpy() for _ in range(2)]
        np.testing.assert_array_equal(*made)
        alone = F.dropout(x[2:], 0.5, rng=flame.random.Rng(np, 1, 2, np.arange(2, 3))).numpy()
        np.testing.assert_array_equal(alone, made[0][2:])

    def test_random_numbers_after_a_seed(self) -> None:
        x = flame.ones(64, 8, requires_grad=True)
        drop, q = nn.Dropout(0.25), flame.ones(2, 3, 5, 8)

        def drawn() -> list[np.ndarray]:
            flame.manual_seed(7)
            made = [F.dropout(x, 0.5), drop(x), F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)]
            return [t.numpy() for t in made]

        first, second = drawn(), drawn()
        assert all((a == b).all() for a, b in zip(first, second, strict=True))
        assert not (first[0].astype(bool) == first[1].astype(bool)).all()
        assert 0.4 < (first[0] == 0).mean() < 0.6
        assert 0.15 < (first[1] == 0).mean() < 0.35
        assert set(np.unique(first[1])) == {0.0, np.float32(1 / 0.75)}
        assert (drop.eval()(x) == x).all().item()
        before = drawn()[0]
        assert not (F.dropout(x, 0.5).numpy() == before).all()  # the next numbers are others
        with capturing(), pytest.raises(RuntimeError, match=r"same random numbers at each replay: draw with rng="):
            F.dropout(x, 0.5)

    def test_what_runs_again_draws_the_same(self) -> None:
        x = flame.ones(64, 8, requires_grad=True)
        y = flame.checkpoint(lambda x: F.dropout(x * 2.0, 0.5), x)
        flame.rand(3)
        y.sum().backward()
        np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
        z = flame.ones(64, 8, requires_grad=True)
        kept = flame.rematerialize(lambda z: F.dropout(z, 0.5), z, min_bytes=0)
        flame.rand(3)
        (kept * kept).sum().backward()
        np.testing.assert_array_equal(z.grad.numpy(), 4.0 * kept.numpy())

    def test_doors_that_mean_the_same(self) -> None:
        x = flame.tensor([[-1.0, 2.0], [3.0, -4.0]])
        assert flame.cat is F.cat
        assert (flame.float32, flame.long) == (np.float32, np.int64)
        assert x.to(flame.bfloat16).dtype == x.bfloat16().dtype
        assert (x.half().dtype, x.double().dtype, x.long().tolist()) == (np.float16, np.float64, [[-1, 2], [3, -4]])
        assert x.cpu() is x
        assert x.sum(axis=0).tolist() == F.sum(x, axis=0).tolist() == [2.0, -2.0]
        assert x.mean(axis=1, keepdims=True).shape == F.mean(x, 1, keepdims=True).shape == (2, 1)
        assert flame.cat([x, x], axis=1).shape == (2, 4)
        assert x.relu_() is x
        assert x.tolist() == nn.ReLU()(x).tolist() == [[0.0, 2.0], [3.0, 0.0]]
        for part, function in (
            (nn.GELU(), F.gelu),
            (nn.SiLU(), F.silu),
            (nn.Sigmoid(), F.sigmoid),
            (nn.Tanh(), F.tanh),
        ):
            assert part(x).tolist() == function(x).tolist()
        assert nn.Identity(3, bias=False)(x) is x

    def test_zero_grad_of_a_model(self) -> None:
        layer = nn.Linear(2, 2)
        layer.init(np.random.default_rng(0))
        optimizer = optim.SGD(layer.requires_grad_().parameters(), lr=1.0)
        before = layer.weight.numpy().copy()
        layer(flame.ones(1, 2)).sum().backward()
        layer.zero_grad()
        optimizer.step()
        assert (layer.weight.numpy() == before).all()

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            (lambda x: flame.from_numpy(x), "write flame.tensor"),
            (lambda x: flame.normal(0.0, 1.0), "write mean \\+ std"),
            (lambda x: nn.Parameter(x), "nn.param\\(3, 4\\)"),
            (lambda x: nn.MSELoss(), "call F.mse_loss"),
            (lambda x: optim.lr_scheduler, "optim.Schedule"),
            (lambda x: optim.SGD([x], lr=0.1).param_groups, "set\\('lr', rate\\)"),
            (lambda x: nn.Linear(1, 1).half(), 'model.to\\("float16"\\)'),
            (lambda x: F.relu_(x), "write F.relu, or"),
            (lambda x: x.exp_(), "x.copy_\\(F.exp\\(x\\)\\)"),
            (lambda x: x.celu(), "write F.celu\\(x\\)"),
            (lambda x: x.expand_as(x), "x.expand\\(other.shape\\)"),
            (lambda x: x.nothing, "no attribute 'nothing'"),
            (lambda x: F.relu(x, inplace=True), "leave it out"),
            (lambda x: nn.ReLU(inplace=True), "leave it out"),
            (lambda x: x.sum(axes=(0,), dim=0), "given twice"),
        ],
    )
    def test_what_is_missing_names_its_counterpart(self, wrong: Any, told: str) -> None:
        with pytest.raises((AttributeError, TypeError), match=told):
            wrong(flame.tensor([1.0], requires_grad=True))

    def test_counterparts_exist(self) -> None:
        """What the sentences name is there, and what they are for is not."""
        spaces = {"flame": flame, "F": F, "nn": nn, "optim": optim, "x": flame.tensor([1.0])}
        tables = {"flame": "FLAME", "F": "FUNCTIONAL", "nn": "NN", "optim": "OPTIM", "x": "TENSOR"}
        for root, table in tables.items():
            for name, hint in getattr(flame.counterparts, table).items():
                assert not hasattr(spaces[root], name), name
                for found in re.findall(r"\b(?:flame|F|nn|optim|x)\.[a-z_A-Z0-9.]*\w", hint):
                    start, _, rest = found.partition(".")
                    attrgetter(rest)(spaces[start])

    def test_writing_in_place(self) -> None:
        x = flame.tensor([1.0], requires_grad=True)
        with pytest.raises(RuntimeError, match="not written in place"):
            x.add_(1.0)
        with pytest.raises(RuntimeError, match="not written in place"):
            x[0] = 2.0
        with flame.no_grad():
            x.add_(1.0)
        assert x.item() == 2.0

    def test_writing_is_not_followed(self) -> None:
        x, buffer = flame.tensor([1.0], requires_grad=True), flame.tensor([0.0])
        total = first = x * 2.0
        total += x
        assert (total.item(), first.item()) == (3.0, 2.0)
        with pytest.raises(RuntimeError, match="gradient would be lost"):
            buffer.add_(x)
        kept = x * buffer
        buffer += 1.0
        with pytest.raises(RuntimeError, match="written in place since"):
            kept.backward()

    def test_what_a_checkpoint_returns(self) -> None:
        x = flame.tensor([1.0], requires_grad=True)
        with pytest.raises(TypeError, match="a Tensor or a tuple"):
            flame.checkpoint(lambda v: [v], x)
        _, detached = flame.checkpoint(lambda v: (v * 2.0, v.detach()), x)
        assert detached.requires_grad

    def test_what_numpy_has(self) -> None:
        x, y = flame.tensor([5.5, -5.5]), flame.tensor([2.0, 2.0])
        assert not any(hasattr(x, name) for name in ("remainder", "__mod__"))
        assert (x - x // y * y).tolist() == [1.5, 0.5]
        assert bool((x > 5.0).amax())
        turned = flame.tensor(np.ones((2, 3))).T
        assert not np.shares_memory(turned.view(6).data, turned.data)

    def test_unused_inputs(self) -> None:
        x, y = (flame.tensor([1.0], requires_grad=True) for _ in range(2))
        with pytest.raises(RuntimeError, match="was not used"):
            flame.grad([(x * 2).sum()], [y])
        assert flame.grad([(x * 2).sum()], [y], allow_unused=True) == (None,)

    def test_a_missing_gradient_counts_as_zeros(self) -> None:
        p = flame.tensor([1.0], requires_grad=True)
        optimizer = optim.AdamW([p], lr=0.1, weight_decay=0.5)
        optimizer.step()
        assert p.item() == pytest.approx(0.95)
        p.requires_grad_(False)
        with pytest.raises(RuntimeError, match="frozen"):
            optimizer.step()

    def test_a_rate_of_ones_own(self) -> None:
        p = flame.tensor([1.0], requires_grad=True)
        optimizer = optim.SGD([p], lr=0.1)
        for step in range(3):
            optimizer.set("lr", 0.5**step)
            optimizer.zero_grad()
            p.sum().backward()
            optimizer.step()
        assert p.item() == pytest.approx(1 - 1.75)

    def test_gradients_that_are_kept(self) -> None:
        p = flame.tensor([1.0], requires_grad=True)
        optimizer = optim.SGD([p], lr=0.1)
        (p * 2.0).sum().backward()
        kept, array = p.grad, p.grad.numpy()
        optimizer.zero_grad()
        assert (kept.item(), array[0], p.grad.item()) == (2.0, 0.0, 0.0)

    def test_a_step_that_is_not_finite_is_skipped(self) -> None:
        p = flame.tensor([1.0], requires_grad=True)
        optimizer = optim.AdamW([p], lr=0.1)
        (p * np.inf).sum().backward()
        optimizer.step()
        assert p.item() == 1.0
        optimizer.zero_grad()
        (p * 2.0).sum().backward()
        optimizer.step()
        assert p.item() < 1.0
        assert optimizer.metrics()["skipped"].item() == 1

    def test_sizes_truth_values_and_maxima(self) -> None:
        x = flame.tensor([[1.0, 2.0]])
        assert x.size == 2
        assert type(x.max(1)) is tuple
        with pytest.raises(TypeError, match="boolean tensors"):
            flame.tensor([1, 2]) & flame.tensor([1, 2])

    def test_unknown_keywords(self) -> None:
        with pytest.raises(TypeError, match="relu: argument 'inplace' is unknown"):
            F.relu(flame.tensor([1.0]), inplace=True)
