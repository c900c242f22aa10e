"""Qwen3-VL against transformers': its vision tower, and the text half's states of prompts with images."""

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
from flame_train.text_encoders.qwen3.vision import VisionArch, VisionTower, interpolation
from tests.parity.key_tables import below, check_bijective, on_meta

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOWER = VisionArch(48, 5, heads=4, hidden=40, out_width=32, taps=(0, 2, 3), positions=16)  # fewer than patches
TEXT = Qwen3Arch(32, 4, heads=4, kv_heads=2, hidden=48, vocabulary=99, head_dim=16, theta=5e6, sections=(3, 3, 2))
IMAGE, VIDEO = 90, 91
SIZES = (96, 160), (128, 64)


def config_of(tower, text, **changed):
    """transformers' configuration of these two halves."""
    return transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": text.vocabulary,
            "hidden_size": text.width,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "num_key_value_heads": text.kv_heads,
            "intermediate_size": text.hidden,
            "head_dim": text.head_dim,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.theta,
                "mrope_section": list(text.sections),
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": tower.layers,
            "hidden_size": tower.width,
            "num_heads": tower.heads,
            "intermediate_size": tower.hidden,
            "out_hidden_size": tower.out_width,
            "num_position_embeddings": tower.positions,
            "deepstack_visual_indexes": list(tower.taps),
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        **changed,
    )


def scrambled(network, seed):
    """Random weights, none of them at its neutral value: biases and norms count too."""
    rng = np.random.default_rng(seed)
    network.init(rng, "float32")
    for _, t in network.weights():
        if t.ndim == 1:
            t.data[...] += 0.2 * rng.standard_normal(t.shape)
    return network


@pytest.fixture(scope="module")
def ours():
    return scrambled(VisionTower(TOWER), 0), scrambled(Qwen3(TEXT), 1)


@pytest.fixture(scope="module")
def twin(ours):
    model = transformers.Qwen3VLModel(config_of(TOWER, TEXT)).eval()
    for part, network in zip((model.visual, model.language_model), ours, strict=True):
        part.load_state_dict({name: torch.from_numpy(np.array(t.numpy())) for name, t in network.weights()})
    return model


@pytest.fixture(scope="module")
def images():
    return [np.random.default_rng(i).integers(0, 256, (*size, 3)).astype(np.uint8) for i, size in enumerate(SIZES)]


def processed(images):
    """The pixel values and the grids of transformers' own image processor, with the numbers published for Qwen3-VL."""
    half = [0.5] * 3
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=16, image_mean=half, image_std=half, size={"shortest_edge": 32 * 32, "longest_edge": 10**7}
    )
    return processor(images=images, return_tensors="pt")


def features_of(tower, images):
    with no_grad():
        return tuple(tower(tensor(image[None])) for image in images)


def test_the_towers_features_and_taps(ours, twin, images, off):
    """Of images of two sizes, whose pixels transformers' processor scales and puts in order for its own tower."""
    given = processed(images)
    with torch.no_grad():
        expected = twin.visual(given.pixel_values, given.image_grid_thw)
    whole = [expected.pooler_output, *expected.deepstack_features]
    found = features_of(ours[0], images)
    assert len(whole) == 1 + len(TOWER.taps)
    for i, wanted in enumerate(whole):
        made = np.concatenate([features[i].numpy()[0] for features in found])
        assert off(made, wanted) < 1e-5, i
        assert np.abs(made[:15] - made[:15].mean(0)).max() > 0.1 * np.abs(made).max()  # places differ


def test_a_batch_is_its_images(ours, images, off):
    first, other = images[0], images[0][::-1].copy()
    together = ours[0](tensor(np.stack([first, other])))
    for i, features in enumerate(features_of(ours[0], [first, other])):
        for one, both in zip(features, together, strict=True):
            assert off(both.numpy()[i], one.numpy()[0]) < 1e-5


def prompt(texts, images, side=32):
    """Ids with placeholders of each image between texts of so many tokens, and where these begin; `side` of a token."""
    rng, ids, starts = np.random.default_rng(7), [], []
    for i, count in enumerate(texts):
        ids += rng.integers(0, IMAGE, count).tolist()
        if i < len(images):
            starts.append(len(ids))
            ids += [IMAGE] * (images[i].shape[0] // side * (images[i].shape[1] // side))
    return ids, tuple(starts)


def seen_by(tower, images, starts, rows):
    """What the text half is given of the images, the same in all rows."""
    grids = tuple((image.shape[0] // 32, image.shape[1] // 32) for image in images)
    with no_grad():
        features = tuple(tower(tensor(np.stack([image] * rows))) for image in images)
    return ImageTokens(starts, grids, features)


@pytest.mark.parametrize("texts", [(4, 9), (0, 5), (4, 3, 6), (5, 1, 0)], ids=str)
def test_states_of_prompts_with_images(ours, twin, images, off, texts):
    """The last layer's states before the norm, of two rows of which one has padding at its end."""
    tower, text = ours
    shown = images[: len(texts) - 1]
    row, starts = prompt(texts, shown)
    ids = np.array([[*row, 5, 6, 7], [*row, 8, 0, 0]], np.int32)
    mask = np.ones(ids.shape, bool)
    mask[1, -2:] = False
    (found,) = text(tensor(ids), tensor(mask), normalised=False, images=seen_by(tower, shown, starts, 2))
    given = processed(shown * 2)
    states = {}
    handle = twin.language_model.norm.register_forward_pre_hook(lambda _, args: states.update(last=args[0]))
    with torch.no_grad():
        twin(
            input_ids=torch.from_numpy(ids.astype(np.int64)),
            attention_mask=torch.from_numpy(mask.astype(np.int64)),
            mm_token_type_ids=torch.from_numpy((ids == IMAGE).astype(np.int32)),
            pixel_values=given.pixel_values,
            image_grid_thw=given.image_grid_thw,
        )
    handle.remove()
    expected = states["last"].numpy()
    assert off(found.numpy()[mask], expected[mask]) < 1e-5
    (without,) = text(tensor(ids), None, normalised=False, images=seen_by(tower, shown, starts, 2))
    assert off(without.numpy()[mask], expected[mask]) < 1e-5  # tokens see those before them alone


def test_positions_in_the_table_against_a_loop():
    """Bilinear interpolation as a sum over the whole table, patch by patch in the order of merged groups."""
    side, rows, columns = 5, 6, 8
    table = np.random.default_rng(3).standard_normal((side, side))
    index, shares = interpolation(rows, columns, side, 2)
    found = (table.reshape(-1)[index] * shares).sum(1)
    places = [(2 * i + k, 2 * j + m) for i in range(3) for j in range(4) for k in range(2) for m in range(2)]
    for value, (row, column) in zip(found, places, strict=True):
        y, x = row * (side - 1) / (rows - 1), column * (side - 1) / (columns - 1)
        near = np.clip(1 - np.abs(np.arange(side) - y), 0, 1)[:, None] * np.clip(1 - np.abs(np.arange(side) - x), 0, 1)
        assert abs(value - (near * table).sum()) < 1e-12


@pytest.mark.parametrize("size", ["b4", "b8"])
def test_the_names_are_the_published_models(size):
    """Total and one to one, and each half leaves the other's out, in a folder, in one file, and alone."""
    tower, text = getattr(VisionArch, size)(), getattr(Qwen3Arch, f"vl_{size}")()
    whole = on_meta(transformers.Qwen3VLForConditionalGeneration, config=config_of(tower, text))
    vision, native = VisionTower(tower).shapes(), Qwen3(text).shapes()
    theirs = {name.removeprefix("model.visual."): s for name, s in whole.items() if name.startswith("model.visual.")}
    check_bijective(keys_qwen3.vision_table(), vision, theirs)
    assert VisionArch.from_shapes(vision) == tower

    inside = "text_encoders.vl.transformer."
    places = ("text_encoder/model.", inside, f"{inside}model.", "model.", "")
    seen = keys_qwen3.vision_component("vision", tuple(f"{place}visual." for place in places))
    halves = seen, keys_qwen3.vl_component("vl", "model.")
    for names in (
        below({"text_encoder/": whole}),
        below({f"{inside}model.": native, f"{inside}visual.": vision}),
        below({f"{inside}model.": native, f"{inside}model.visual.": vision}),
        below({"model.": native, "visual.": vision}),
    ):
        found = resolve(halves, names)
        assert all(name.endswith("lm_head.weight") for name in found.unknown)
        assert found.ignored == ()
        assert found.sources["vision"].keys() == vision.keys()
        assert found.sources["text_encoder"].keys() == native.keys()
        (alone,) = (component for component in halves if component.name == "text_encoder")
        left = resolve([alone], names)
        assert left.sources["text_encoder"].keys() == native.keys()
    assert resolve(halves[:1], below({"visual.": vision})).sources["vision"].keys() == vision.keys()


def test_the_folders_numbers_are_read(tmp_path):
    file = tmp_path / "config.json"
    config_of(TOWER, TEXT).to_json_file(file, use_diff=False)
    stated, vision, native = Stated.read(file), VisionTower(TOWER).shapes(), Qwen3(TEXT).shapes()
    assert VisionArch.from_shapes(vision, stated) == TOWER
    assert Qwen3Arch.from_shapes(native, stated) == TEXT
    tiny = VisionArch.tiny()
    assert VisionArch.from_shapes(VisionTower(tiny).shapes()) == tiny
    for half, change, words in [
        ("vision_config", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'gelu_pytorch_tanh'"),
        ("vision_config", {"patch_size": 14}, "patch_size is 14, expected 16"),
        (
            "vision_config",
            {"spatial_merge_size": 4, "temporal_patch_size": 1},
            "temporal_patch_size is 1.*spatial_merge",
        ),
        ("vision_config", {"num_heads": 5}, "5 heads of 48 values"),
        ("vision_config", {"deepstack_visual_indexes": [0, 2]}, r"\[0, 2\], expected 3 of 5 blocks in order"),
        ("vision_config", {"deepstack_visual_indexes": "all"}, "expected a list of whole numbers, got 'all'"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 4]}}, "expected three numbers"),
        ("text_config", {"rope_parameters": {"mrope_interleaved": False}}, "mrope_interleaved is False"),
    ]:
        config = json.loads(file.read_text())
        config[half] |= change
        with pytest.raises(ModelFileError, match=words):
            (VisionArch if half == "vision_config" else Qwen3Arch).from_shapes(
                vision if half == "vision_config" else native, Stated(file, config)
            )


def test_what_does_not_fit_is_refused(ours, images):
    tower, text = ours
    with pytest.raises(ShapeError, match="multiples of 32, got"):
        tower(tensor(images[0][None, :90]))
    features = features_of(tower, images)
    with pytest.raises(ShapeError, match="a start, a grid and features for each image"):
        ImageTokens((1,), ((3, 5), (4, 2)), features)
    with pytest.raises(ShapeError, match="do not overlap"):
        ImageTokens((1, 10), ((3, 5), (4, 2)), features)
    ids = tensor(np.zeros((1, 30), np.int32))
    for seen in (ImageTokens((1, 16), ((3, 4), (4, 2)), features), ImageTokens((1, 25), ((3, 5), (4, 2)), features)):
        with pytest.raises(ShapeError, match="ImageTokens: expected features"):
            text(ids, images=seen)
