"""Qwen2.5-VL against transformers': its vision tower, and the text half's states of prompts with images.

transformers is told which tokens are of images: without that it numbers all in a row, and says nothing.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from flame_train.engine import no_grad, tensor
from flame_train.errors import ModelFileError, ShapeError
from flame_train.io.resolve import resolve
from flame_train.networks.files.stated import Stated
from flame_train.text_encoders.qwen3 import names as keys_qwen3
from flame_train.text_encoders.qwen3.image_tokens import ImageTokens
from flame_train.text_encoders.qwen3.network import Qwen3, Qwen3Arch
from flame_train.text_encoders.qwen3.vision_2_5 import Vision25Arch, VisionTower25
from tests.parity.key_tables import below, check_bijective, on_meta
from tests.parity.models.test_qwen3_vision import IMAGE, VIDEO, prompt, scrambled

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOWER = Vision25Arch(48, 3, heads=4, hidden=40, out_width=32, whole=(1,))
TEXT = Qwen3Arch(32, 4, heads=2, kv_heads=1, hidden=48, vocabulary=99, head_dim=16, biases=True, sections=(2, 3, 3))
SIDE = 28
SIZES = (252, 140), (56, 280)  # of windows of 112, some of which the edges cut


def config_of(tower, text):
    """transformers' configuration of these two halves."""
    return transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": text.vocabulary,
            "hidden_size": text.width,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "intermediate_size": text.hidden,
            "rms_norm_eps": text.eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.theta,
                "mrope_section": list(text.sections),
            },
        },
        vision_config={
            "depth": tower.layers,
            "hidden_size": tower.width,
            "num_heads": tower.heads,
            "intermediate_size": tower.hidden,
            "out_hidden_size": tower.out_width,
            "fullatt_block_indexes": list(tower.whole),
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
    )


@pytest.fixture(scope="module")
def ours():
    return scrambled(VisionTower25(TOWER), 0), scrambled(Qwen3(TEXT), 1)


@pytest.fixture(scope="module")
def twin(ours):
    model = transformers.Qwen2_5_VLModel(config_of(TOWER, TEXT)).eval()
    for part, network in zip((model.visual, model.language_model), ours, strict=True):
        part.load_state_dict({name: torch.from_numpy(np.array(t.numpy())) for name, t in network.weights()})
    return model


@pytest.fixture(scope="module")
def images():
    return [np.random.default_rng(i).integers(0, 256, (*size, 3)).astype(np.uint8) for i, size in enumerate(SIZES)]


def processed(images):
    """The pixel values and the grids of transformers' own image processor, as published for Qwen2.5-VL."""
    processor = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 12845056})
    return processor(images=images, return_tensors="pt")


def test_the_towers_features(ours, twin, images, off):
    given = processed(images)
    with torch.no_grad():
        expected = twin.visual(given.pixel_values, given.image_grid_thw).pooler_output
    with no_grad():
        found = np.concatenate([ours[0](tensor(image[None]))[0].numpy()[0] for image in images])
        both = ours[0](tensor(np.stack([images[0], images[0][::-1]])))[0].numpy()
    assert off(found, expected) < 1e-5
    assert off(both[0], expected[: len(both[0])]) < 1e-5


@pytest.mark.parametrize("texts", [(4, 9), (0, 5), (4, 3, 6), (5, 1, 0)], ids=str)
def test_states_of_prompts_with_images(ours, twin, images, off, texts):
    """The last layer's normalised states, of two rows of which one has padding at its end."""
    tower, text = ours
    shown = images[: len(texts) - 1]
    row, starts = prompt(texts, shown, SIDE)
    ids = np.array([[*row, 5, 6, 7], [*row, 8, 0, 0]], np.int32)
    mask = np.ones(ids.shape, bool)
    mask[1, -2:] = False
    grids = tuple((image.shape[0] // SIDE, image.shape[1] // SIDE) for image in shown)
    with no_grad():
        features = tuple(tower(tensor(np.stack([image] * 2))) for image in shown)
        (found,) = text(tensor(ids), images=ImageTokens(starts, grids, features))
    given = processed(shown * 2)
    with torch.no_grad():
        expected = twin(
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            mm_token_type_ids=torch.from_numpy((ids == IMAGE).astype(np.int32)),
            pixel_values=given.pixel_values,
            image_grid_thw=given.image_grid_thw,
        ).last_hidden_state.numpy()
    assert off(found.numpy()[mask], expected[mask]) < 1e-5


def test_the_names_are_the_published_models():
    """Total and one to one, and each half leaves the other's out: in a folder new and old, in one file, and alone."""
    tower, text = Vision25Arch.b7(), Qwen3Arch.vl2_5_b7()
    whole = on_meta(transformers.Qwen2_5_VLForConditionalGeneration, config=config_of(tower, text))
    older = {name.replace("model.visual.", "visual.").replace("language_model.", ""): s for name, s in whole.items()}
    vision, native = VisionTower25(tower).shapes(), Qwen3(text).shapes()
    theirs = {name.removeprefix("model.visual."): s for name, s in whole.items() if name.startswith("model.visual.")}
    check_bijective(keys_qwen3.vision_2_5_table(), vision, theirs)
    assert (len(vision), sum(map(np.prod, vision.values()))) == (390, 676_550_144)
    assert Vision25Arch.from_shapes(vision) == tower
    assert Qwen3Arch.from_shapes(native) == text
    halves = keys_qwen3.vl_vision_component("vl"), keys_qwen3.vl_component("vl", "text_encoder/model.")
    inside = "text_encoders.vl.transformer."
    for names in (
        below({"text_encoder/": whole}),
        below({"text_encoder/": older}),
        below({f"{inside}model.": native, f"{inside}visual.": vision}),
    ):
        found = resolve(halves, names)
        assert all(name.endswith("lm_head.weight") for name in found.unknown)
        assert found.sources["vision"].keys() == vision.keys()
        assert found.sources["text_encoder"].keys() == native.keys()


def test_the_folders_numbers_are_read(tmp_path):
    file = tmp_path / "config.json"
    config_of(TOWER, TEXT).to_json_file(file, use_diff=False)
    stated, vision, native = Stated.read(file), VisionTower25(TOWER).shapes(), Qwen3(TEXT).shapes()
    assert Vision25Arch.from_shapes(vision, stated) == TOWER
    assert Qwen3Arch.from_shapes(native, stated) == TEXT
    for half, change, words in [
        ("vision_config", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("vision_config", {"window_size": 56}, "window_size is 56, expected 112"),
        ("vision_config", {"num_heads": 5}, "5 heads of 48 values"),
        ("vision_config", {"fullatt_block_indexes": "all"}, "expected a list of whole numbers, got 'all'"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 4, 4]}}, "expected three numbers that make 8"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": True}}, "mrope_interleaved is True"),
    ]:
        config = json.loads(file.read_text())
        config[half] |= change
        reads, native_names = (Vision25Arch, vision) if half == "vision_config" else (Qwen3Arch, native)
        with pytest.raises(ModelFileError, match=words):
            reads.from_shapes(native_names, Stated(file, config))


def test_sides_that_are_no_whole_tokens_are_refused(ours, images):
    with pytest.raises(ShapeError, match="multiples of 28, got"):
        ours[0](tensor(images[0][None, :90]))
