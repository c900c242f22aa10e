"""resize, extract and merge of LoRAs into one, against NumPy's SVD of the whole update and sums in fp64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

from flame_train import cli
from flame_train.adapters.factors import LoraFactors
from flame_train.adapters.formats import from_file, to_kohya
from flame_train.adapters.kinds.dora import DoraFactors
from flame_train.adapters.kinds.loha import LohaFactors
from flame_train.adapters.kinds.lokr import LokrFactors
from flame_train.adapters.nearest import Truncation, nearest_to, truncate
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.sdxl.names import lora_family
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge

SDXL = lora_family()
LINEAR = "input_blocks.4.1.transformer_blocks.0.attn1.to_q"
CONV = "output_blocks.8.0.in_layers.2"
SAID = {"ss_base_model_version": "sdxl_base_v1-0"}


def run(*arguments):
    return cli.run([str(a) for a in arguments])


@pytest.fixture(scope="module")
def base(request):
    """The small SDXL's weights of the two layers, and the file."""
    from flame_train.models.common.small import SMALL_SDXL

    with SafetensorsFile(SMALL_SDXL) as file:
        found = {m: np.array(file.read(f"model.diffusion_model.{m}.weight"), np.float32) for m in (LINEAR, CONV)}
    return SMALL_SDXL, found


@pytest.fixture
def lora(base, tmp_path):
    """Writes a LoRA over both layers: name -> path."""

    def made(name, rank=6, alpha=3.0, seed=0, dtype=np.float32):
        rng = np.random.default_rng(seed)
        state = {}
        for module, weight in base[1].items():
            out, *taps = weight.shape
            up = rng.standard_normal((out, rank, *(1 for _ in taps[1:])))
            falling = 0.5 ** np.arange(rank).reshape(-1, *(1 for _ in taps))
            down = falling * rng.standard_normal((rank, *taps))
            state[module] = LoraFactors(down.astype(dtype), up.astype(dtype), alpha)
        return write(tmp_path / name, state)

    return made


def write(path, state):
    save_file(path, to_kohya({"unet": state}, SDXL), SAID)
    return path


def updates(path):
    """Module -> alpha / rank * up @ down as a matrix in fp64."""
    found = {}
    for module, f in from_file(path, SDXL).state["unet"].items():
        down, up = (x.astype(np.float64).reshape(len(x), -1) for x in (f.down, f.up))
        found[module] = f.alpha / f.rank * up @ down
    return found


def left_out(matrix, rank):
    return np.sqrt((np.linalg.svd(matrix, compute_uv=False)[rank:] ** 2).sum())


class TestResize:
    @pytest.mark.parametrize("rank", [1, 3, 5])
    def test_the_error_is_that_of_the_singular_values_left_out(self, lora, tmp_path, rank, capsys):
        before = updates(lora("a.safetensors"))
        assert (
            run("resize", tmp_path / "a.safetensors", "--rank", rank, "-o", tmp_path / "b.safetensors", "--json") == 0
        )
        said = json.loads(capsys.readouterr().out)
        after = updates(tmp_path / "b.safetensors")
        distances = {m: np.linalg.norm(after[m] - before[m]) for m in before}
        for module, matrix in before.items():
            np.testing.assert_allclose(distances[module], left_out(matrix, rank), rtol=1e-5)
        total = np.sqrt(sum(np.linalg.norm(m) ** 2 for m in before.values()))
        np.testing.assert_allclose(said["error"], np.sqrt(sum(d**2 for d in distances.values())) / total, rtol=1e-5)
        worst = max(distances, key=lambda m: distances[m] / np.linalg.norm(before[m]))
        assert said["largest_error_in"] == f"unet {worst}"
        assert said["ranks"] == {str(rank): 2}

    def test_alpha_keeps_its_meaning(self, lora, tmp_path):
        """alpha / rank stays 0.5, so the matrices are of the size they were trained at."""
        run("resize", lora("a.safetensors", rank=6, alpha=3.0), "--rank", "2", "-o", tmp_path / "b.safetensors")
        for factors in from_file(tmp_path / "b.safetensors", SDXL).state["unet"].values():
            assert (factors.rank, factors.alpha) == (2, 1.0)
        with SafetensorsFile(tmp_path / "b.safetensors") as file:
            assert (file.metadata["ss_network_dim"], file.metadata["ss_network_alpha"]) == ("2", "1.0")

    @pytest.mark.parametrize("error", [0.1, 0.3, 0.6])
    def test_the_smallest_rank_within_an_error(self, lora, tmp_path, error):
        before = updates(lora("a.safetensors"))
        run("resize", tmp_path / "a.safetensors", "--error", error, "-o", tmp_path / "b.safetensors")
        for module, factors in from_file(tmp_path / "b.safetensors", SDXL).state["unet"].items():
            size = np.linalg.norm(before[module])
            assert left_out(before[module], factors.rank) <= error * size
            assert factors.rank == 1 or left_out(before[module], factors.rank - 1) > error * size

    def test_names_and_number_format_stay(self, lora, tmp_path):
        convert(lora("a.safetensors", dtype=np.float16), tmp_path / "peft.safetensors", "diffusers")
        for name, end in (("a", ".lora_down.weight"), ("peft", ".lora_A.weight")):
            run("resize", tmp_path / f"{name}.safetensors", "--rank", "2", "-o", tmp_path / f"{name}2.safetensors")
            found = safetensors.numpy.load_file(tmp_path / f"{name}2.safetensors")
            assert {x.dtype for n, x in found.items() if n.endswith(end)} == {np.dtype(np.float16)}

    @pytest.mark.parametrize(
        ("options", "code", "said"),
        [
            (["--rank", "6"], 2, "nothing can be cut: its highest rank is 6"),
            ([], 2, "expected one of --rank N and --error E, got none"),
            (["--rank", "2", "--error", "0.1"], 2, "got both"),
            (["--rank", "0"], 2, "--rank: expected at least 1, got 0"),
            (["--error", "1.5"], 2, "--error: expected a share"),
            (["--error", "nan"], 2, "--error: expected a share"),
        ],
    )
    def test_what_cannot_be_done_is_told_and_nothing_written(self, lora, tmp_path, options, code, said, capsys):
        assert run("resize", lora("a.safetensors"), *options, "-o", tmp_path / "b.safetensors") == code
        assert said in capsys.readouterr().err
        assert not (tmp_path / "b.safetensors").exists()

    def test_another_kind_is_refused_with_the_way(self, base, tmp_path, capsys):
        path = write(tmp_path / "loha.safetensors", {LINEAR: loha(base[1][LINEAR])})
        assert run("resize", path, "--rank", "1", "-o", tmp_path / "b.safetensors") == 3
        assert "`flame-train merge --to lora` makes a LoRA of it" in capsys.readouterr().err


class TestExtract:
    def tuned(self, base, lora, tmp_path, strength=1.0):
        merge(base[0], lora, tmp_path / "tuned.safetensors", strength)
        return tmp_path / "tuned.safetensors"

    def differences(self, base, path):
        with SafetensorsFile(path) as file:
            return {
                m: np.array(file.read(f"model.diffusion_model.{m}.weight"), np.float64).reshape(len(w), -1)
                - w.reshape(len(w), -1)
                for m, w in base[1].items()
            }

    @pytest.mark.parametrize("rank", [2, 6, 9])
    def test_the_error_is_that_of_the_singular_values_left_out(self, base, lora, tmp_path, rank, capsys):
        tuned = self.tuned(base, lora("a.safetensors"), tmp_path)
        out = tmp_path / "x.safetensors"
        assert run("extract", base[0], tuned, "-o", out, "--rank", rank, "--precision", "fp32", "--json") == 0
        said = json.loads(capsys.readouterr().out)
        found, expected = updates(out), self.differences(base, tuned)
        assert found.keys() == expected.keys()  # the layers that are equal have none
        for module, matrix in expected.items():
            size = np.linalg.norm(matrix)
            np.testing.assert_allclose(
                np.linalg.norm(found[module] - matrix), left_out(matrix, rank), rtol=1e-4, atol=1e-6 * size
            )
        total = np.sqrt(sum(np.linalg.norm(m) ** 2 for m in expected.values()))
        lost = np.sqrt(sum(left_out(m, rank) ** 2 for m in expected.values()))
        np.testing.assert_allclose(said["error"], lost / total, rtol=1e-4, atol=1e-7)
        assert said["differences_left_out"] == 0

    def test_it_merges_back_to_the_tuned_model(self, base, lora, tmp_path):
        tuned = self.tuned(base, lora("a.safetensors"), tmp_path)
        run("extract", base[0], tuned, "-o", tmp_path / "x.safetensors", "--error", "0.01", "--precision", "fp32")
        merge(base[0], tmp_path / "x.safetensors", tmp_path / "again.safetensors")
        one, two = (self.differences(base, path) for path in (tuned, tmp_path / "again.safetensors"))
        for module in one:
            assert np.linalg.norm(one[module] - two[module]) <= 0.011 * np.linalg.norm(one[module])

    def test_what_no_lora_holds_is_counted(self, base, lora, tmp_path, capsys):
        tuned = self.tuned(base, lora("a.safetensors"), tmp_path)
        with SafetensorsFile(tuned) as file:
            tensors = {name: np.array(file.read(name)) for name in file.names}
            metadata = dict(file.metadata)
        tensors["model.diffusion_model.out.0.weight"] = tensors["model.diffusion_model.out.0.weight"] + 1
        save_file(tmp_path / "more.safetensors", tensors, metadata)
        out = tmp_path / "x.safetensors"
        assert run("extract", base[0], tmp_path / "more.safetensors", "-o", out, "--rank", "2", "--json") == 0
        assert json.loads(capsys.readouterr().out)["differences_left_out"] == 1

    def test_equal_models_and_files_of_another_kind_are_refused(self, base, lora, tmp_path, capsys):
        out = tmp_path / "x.safetensors"
        assert run("extract", base[0], base[0], "-o", out, "--rank", "2") == 3
        assert "no layer differs" in capsys.readouterr().err
        assert run("extract", base[0], lora("a.safetensors"), "-o", out, "--rank", "2") == 3
        assert "expected a model, but this is" in capsys.readouterr().err
        assert run("extract", base[0], base[0], "-o", base[0], "--rank", "2", "--force") == 2
        assert not out.exists()


class TestMergeLoras:
    def test_without_a_rank_the_update_is_the_sum(self, lora, tmp_path):
        a, b = lora("a.safetensors"), lora("b.safetensors", rank=2, alpha=2.0, seed=1)
        out = tmp_path / "o.safetensors"
        assert run("merge", "--to", "lora", "--lora", f"{a}:0.8", "--lora", f"{b}:-0.5", "-o", out) == 0
        one, two, both = updates(a), updates(b), updates(out)
        x = np.random.default_rng(2).standard_normal((next(iter(both.values())).shape[1], 5))
        np.testing.assert_allclose(both[LINEAR] @ x, 0.8 * (one[LINEAR] @ x) - 0.5 * (two[LINEAR] @ x), atol=1e-5)
        for module in both:
            np.testing.assert_allclose(both[module], 0.8 * one[module] - 0.5 * two[module], atol=2e-6)
        assert {f.rank for f in from_file(out, SDXL).state["unet"].values()} == {8}
        with SafetensorsFile(out) as file:
            merged = json.loads(file.metadata["flame_train.merged"])
        assert merged == [{"lora": "a.safetensors", "strength": 0.8}, {"lora": "b.safetensors", "strength": -0.5}]

    def test_equal_scales_leave_every_bit_of_the_matrices(self, lora, tmp_path):
        a, b = lora("a.safetensors", dtype=np.float16), lora("b.safetensors", seed=1, dtype=np.float16)
        out = tmp_path / "o.safetensors"
        run("merge", "--to", "lora", "--lora", f"{a}:0.5", "--lora", f"{b}:0.5", "-o", out)
        one, two, both = (from_file(path, SDXL).state["unet"] for path in (a, b, out))
        for module, factors in both.items():
            assert factors.up.tobytes() == np.concatenate([one[module].up, two[module].up], 1).tobytes()
            assert (factors.up.dtype, factors.alpha) == (np.float16, 3.0)

    def test_with_a_rank_it_is_the_nearest(self, lora, tmp_path, capsys):
        a, b = lora("a.safetensors"), lora("b.safetensors", seed=1)
        out = tmp_path / "o.safetensors"
        assert run("merge", "--to", "lora", "--lora", a, "--lora", f"{b}:0.5", "--rank", "4", "-o", out, "--json") == 0
        said = json.loads(capsys.readouterr().out)
        one, two, both = updates(a), updates(b), updates(out)
        sums = {m: one[m] + 0.5 * two[m] for m in both}
        for module, matrix in sums.items():
            np.testing.assert_allclose(np.linalg.norm(both[module] - matrix), left_out(matrix, 4), rtol=1e-5)
        lost = np.sqrt(sum(left_out(m, 4) ** 2 for m in sums.values()))
        np.testing.assert_allclose(
            said["error"], lost / np.sqrt(sum(np.linalg.norm(m) ** 2 for m in sums.values())), rtol=1e-5
        )

    @pytest.mark.parametrize("kind", ["loha", "lokr", "dora"])
    def test_other_kinds_become_the_nearest_lora(self, base, lora, tmp_path, kind):
        make = {"loha": loha, "lokr": lokr, "dora": dora}[kind]
        state = {module: make(weight) for module, weight in base[1].items()}
        path, a, out = write(tmp_path / "k.safetensors", state), lora("a.safetensors"), tmp_path / "o.safetensors"
        assert (
            run("merge", base[0], "--to", "lora", "--lora", f"{path}:0.7", "--lora", a, "--rank", "5", "-o", out) == 0
        )
        one, both = updates(a), updates(out)
        for module, weight in base[1].items():
            matrix = one[module] + dense(state[module], weight, 0.7)
            np.testing.assert_allclose(np.linalg.norm(both[module] - matrix), left_out(matrix, 5), rtol=1e-4)
        assert from_file(out, SDXL).state["unet"][CONV].down.shape[1:] == base[1][CONV].shape[1:]

    @pytest.mark.parametrize(
        ("line", "code", "said"),
        [
            ("--lora KIND -o OUT", 2, "loha: no LoRA is exactly that"),
            ("--lora KIND --rank 2 -o OUT", 2, "its update is known with the base model only"),
            ("LORA --lora KIND --rank 2 -o OUT", 3, "expected a base model"),
            ("--lora LORA:0 -o OUT", 2, "expected a finite strength other than 0"),
            ("--lora LORA:nan -o OUT", 2, "expected a finite strength other than 0"),
            ("-o OUT", 2, "name at least one file with --lora"),
            ("--lora LORA", 2, "with --to lora expected"),
            ("--lora LORA -o LORA --force", 2, "would overwrite"),
        ],
    )
    def test_what_cannot_be_done_is_told_and_nothing_written(self, base, lora, tmp_path, line, code, said, capsys):
        names = {"LORA": lora("a.safetensors"), "OUT": tmp_path / "o.safetensors"}
        names["KIND"] = write(tmp_path / "k.safetensors", {LINEAR: loha(base[1][LINEAR])})
        for name, path in names.items():
            line = line.replace(name, str(path))
        assert run("merge", "--to", "lora", *line.split()) == code
        assert said in capsys.readouterr().err
        assert not (tmp_path / "o.safetensors").exists()

    def test_the_options_of_the_two_forms_are_not_mixed(self, base, lora, tmp_path, capsys):
        for line in (
            ["merge", base[0], lora("a.safetensors"), tmp_path / "o.safetensors", "--rank", "2"],
            ["merge", base[0], "--to", "lora", "--strength", "0.5", "-o", tmp_path / "o.safetensors"],
            ["merge", base[0], lora("a.safetensors")],
        ):
            assert run(*line) == 2
        assert "expected BASE LORA OUT" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 4, 3, 3), (7, 7)])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_nearest_product_is_that_of_the_svd(shape, rank):
    update = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    found = nearest_to(update, Truncation(rank=rank))
    u, s, vt = np.linalg.svd(update.reshape(shape[0], -1).astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(
        found.factors.delta().reshape(shape[0], -1), (u[:, :rank] * s[:rank]) @ vt[:rank], atol=1e-5
    )
    np.testing.assert_allclose((found.left_out, found.norm), (np.linalg.norm(s[rank:]), np.linalg.norm(s)), rtol=1e-6)
    assert found.factors.weight_shape == shape


def test_an_update_of_zeros_has_a_lora_of_zeros():
    for found in (
        nearest_to(np.zeros((4, 6), np.float32), Truncation(error=0.1)),
        truncate(LoraFactors(np.ones((3, 6), np.float32), np.zeros((4, 3), np.float32), 3.0), Truncation(rank=1)),
    ):
        assert (found.factors.rank, found.left_out, found.norm) == (1, 0.0, 0.0)
        assert not found.factors.delta().any()


def loha(weight):
    rng, (out, width) = np.random.default_rng(4), (len(weight), weight[0].size)
    shapes = {"hada_w1_a": (out, 2), "hada_w1_b": (2, width), "hada_w2_a": (out, 2), "hada_w2_b": (2, width)}
    return LohaFactors({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, 1.0)


def lokr(weight):
    rng, (out, into, *kernel) = np.random.default_rng(5), weight.shape
    arrays = {"lokr_w1": rng.standard_normal((2, 2)), "lokr_w2": rng.standard_normal((out // 2, into // 2, *kernel))}
    return LokrFactors({n: x.astype(np.float32) for n, x in arrays.items()}, 1.0)


def dora(weight):
    rng, (out, *taps) = np.random.default_rng(6), weight.shape
    down = rng.standard_normal((2, *taps)).astype(np.float32)
    up = rng.standard_normal((out, 2, *(1 for _ in taps[1:]))).astype(np.float32)
    magnitude = rng.uniform(0.5, 2.0, (out, *(1 for _ in taps))).astype(np.float32)
    return DoraFactors(LoraFactors(down, up, 2.0), magnitude)


def dense(factors, weight, strength):
    """The update by the kinds' formulas, in fp64."""
    flat = weight.reshape(len(weight), -1).astype(np.float64)
    a = {name: array.astype(np.float64) for name, array in factors.arrays.items()}
    if factors.kind == "loha":
        made = 0.5 * (a["hada_w1_a"] @ a["hada_w1_b"]) * (a["hada_w2_a"] @ a["hada_w2_b"])
    elif factors.kind == "lokr":
        made = np.kron(a["lokr_w1"], a["lokr_w2"].reshape(len(a["lokr_w2"]), -1))
    else:
        total = flat + a["up"].reshape(len(flat), -1) @ a["down"].reshape(2, -1)
        made = a["dora_scale"].reshape(-1, 1) * total / np.linalg.norm(total, axis=1, keepdims=True) - flat
    return strength * made
