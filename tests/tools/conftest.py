"""Small networks' weights and LoRAs by native names, as others write them and as NumPy merges them."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.io.safetensors import save_file
from flame_train.tools.lora_files import convert
from flame_train.tools.merge import merge
from tests.run_files import arrays_of
from tests.tools.small_sdxl import base_tensors, lora_tensors, write


@pytest.fixture(scope="session")
def lora_over():
    """A LoRA of rank 2 over {native module: (rows, columns)}: module -> (down, up)."""

    def draw(targets):
        rng = np.random.default_rng(1)
        return {
            module: (
                rng.standard_normal((2, columns)).astype(np.float32),
                rng.standard_normal((rows, 2)).astype(np.float32),
            )
            for module, (rows, columns) in targets.items()
        }

    return draw


@pytest.fixture(scope="session")
def kohya():
    """In kohya's names, with alpha 3."""

    def write(lora):
        tensors = {}
        for module, (down, up) in lora.items():
            name = f"lora_unet_{module.replace('.', '_')}"
            tensors |= {
                f"{name}.lora_down.weight": down,
                f"{name}.lora_up.weight": up,
                f"{name}.alpha": np.float32(3.0),
            }
        return tensors

    return write


@pytest.fixture(scope="session")
def native():
    """In the network's own names without alphas: the scale is 1."""

    def write(lora):
        names = {f"diffusion_model.{module}": pair for module, pair in lora.items()}
        return {f"{n}.lora_{ab}.weight": x for n, pair in names.items() for ab, x in zip("AB", pair, strict=True)}

    return write


@pytest.fixture(scope="session")
def expected():
    """The merged tensors by native names in fp64."""

    def merged(base, lora, scale):
        updates = {f"{m}.weight": scale * up.astype(float) @ down for m, (down, up) in lora.items()}
        return {name: x + updates.get(name, 0.0) for name, x in base.items()}

    return merged


@pytest.fixture
def check_merging(tmp_path, kohya, native, expected):
    """A LoRA in each form, merged into a base in each layout, gives what NumPy makes of them."""

    def check(base, lora, layout, form, in_diffusers):
        stored = in_diffusers(base) if layout == "diffusers" else base
        prefix = "model.diffusion_model." if layout == "prefixed" else ""
        save_file(tmp_path / "base.safetensors", {prefix + name: x for name, x in stored.items()})
        save_file(tmp_path / "lora.safetensors", native(lora) if form == "native" else kohya(lora))
        file = tmp_path / "lora.safetensors"
        if form == "diffusers":
            file = tmp_path / "diffusers.safetensors"
            convert(tmp_path / "lora.safetensors", file, "diffusers")
        report = merge(tmp_path / "base.safetensors", file, tmp_path / "out.safetensors", 0.5)
        assert report.modules == {"transformer": len(lora)}
        wanted = expected(base, lora, 0.5 if form == "native" else 0.75)
        wanted = in_diffusers(wanted) if layout == "diffusers" else wanted
        found = arrays_of(tmp_path / "out.safetensors")
        assert found.keys() == {prefix + name for name in wanted}
        for name, values in wanted.items():
            np.testing.assert_allclose(found[prefix + name], values, rtol=1e-5, atol=1e-5, err_msg=name)

    return check


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write(folder / "base.safetensors", base_tensors(), {"modelspec.title": "base", "modelspec.hash_sha256": "0x1"})
    write(folder / "lora.safetensors", lora_tensors(), {"ss_base_model_version": "sdxl_base_v1-0"})
    return folder
