"""A LoRA that learns a motion: a small Wan that knows squares which stand still.

    python scripts/small_clip.py FOLDER [--image docs/images/wan-clip.webp]
    python scripts/small_clip.py FOLDER --device cuda --seconds 45

It takes 95 minutes of one core. With `--seconds 0` the base that lies in the folder is taken.

The base has the published structure. The weights of its autoencoder are set by hand. Its denoiser, random at first, is
trained on clips and stills of squares that stand, each named by its colour. The run's config then
trains a LoRA on clips of squares that always move right, as no still can show. Clips before and after training, from
the same prompts and noise, are put side by side, with how far their squares move.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "small_sdxl"))
from loop import Training

from flame_train.config.schema import ModelSection, TextEncodersSection
from flame_train.data.buckets import Span
from flame_train.data.clip_files import times, webp
from flame_train.data.clips import chosen_frames, frames_of
from flame_train.data.samples import EncoderInput
from flame_train.engine import Tensor, no_grad
from flame_train.engine.backend import get_backend
from flame_train.engine.random import Rng
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.models.common.family import Opening
from flame_train.models.registry import FAMILIES
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.run.encode.encoders import load_encoders
from flame_train.run.plan.encoding import Encoding

Array = np.ndarray[Any, Any]
SIDE: Final = 96
FRAMES: Final = 17
FPS: Final = 24
SQUARE: Final = 32
SPEED: Final = 3.0  # pixels a frame
COLOURS: Final = {"red": (230, 60, 50), "green": (60, 200, 80), "blue": (70, 90, 235), "yellow": (235, 215, 60)}
_PICK, _LEVEL, _NOISE, _DROP = 40, 41, 42, 43  # streams of random numbers
_LOUD: Final = 20.0  # a constant beside which data hardly change a norm
_SPREAD: Final = 0.45  # of colours less the ground
_SHIFT: Final = 3.0  # of noise levels: where a square lies, in all frames, is decided at the noisiest
_GROUND: Final = (24 / 127.5 - 1,) * 3


@dataclass(frozen=True)
class Scene:
    """A square on a dark ground: where it begins, what it moves a frame, and the name of its colour."""

    left: float
    top: float
    right_a_frame: float
    down_a_frame: float
    colour: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} square"

    def clip(self, frames: int = FRAMES) -> Array:
        """uint8 (F, H, W, 3); edges between two pixels are mixed."""
        return np.stack([self._frame(number) for number in range(frames)])

    def _frame(self, number: int) -> Array:
        covered = [
            np.clip(np.minimum(np.arange(SIDE) + 1, begin + SQUARE) - np.maximum(np.arange(SIDE), begin), 0.0, 1.0)
            for begin in (self.top + number * self.down_a_frame, self.left + number * self.right_a_frame)
        ]
        share = np.outer(*covered)[..., None]
        return np.rint((1 - share) * 24 + share * COLOURS[self.colour]).astype(np.uint8)


def scenes(count: int, seed: int, speed: tuple[float, float] | None) -> list[Scene]:
    """Squares anywhere; `speed` to the right and down, None: any."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        right, down = rng.uniform(-SPEED, SPEED, 2) if speed is None else speed
        free = SIDE - SQUARE - max(right, 0.0) * (FRAMES - 1)
        left = rng.uniform(0, max(free, 1.0))
        made.append(Scene(left, rng.uniform(0, SIDE - SQUARE), right, down, list(COLOURS)[number % len(COLOURS)]))
    return made


def to_unit(clips: Array) -> Array:
    return clips.astype(np.float32) / np.float32(127.5) - np.float32(1.0)


def autoencoder(arch: VaeArch) -> dict[str, Array]:
    """Keeps the mean colour of 16 x 16 pixels in each frame, less the ground's; its residual branches do nothing.

    The shortcuts of the published encoder take means of pixels and lay the frames of a latent side by side. The decoder
    takes them apart in channels that its own shortcuts leave at 0. Colours run as pairs of channels, x and -x, beside
    loud constants: silu(u) - silu(-u) is u, so that nothing bends.
    """
    made = {
        name: (np.ones if re.search(r"norm\w*\.weight$", name) else np.zeros)(shape, np.float32)
        for name, shape in Vae(arch).shapes().items()
    }
    smooth = np.outer([0.25, 0.5, 0.25], [0.25, 0.5, 0.25])
    latent, level = arch.latent_channels, _LOUD / 2  # what undoes the RMS norms, in both halves
    centre, spread = np.array(arch.latents_mean), np.array(arch.latents_std)

    def newest(name: str) -> Array:
        """The kernels of a convolution over time that see the frame itself."""
        weight = made[f"{name}.weight"]
        return weight[len(weight) * 2 // 3 :]

    for name in ("quant_conv", "post_quant_conv"):
        made[f"{name}.weight"][:, :, 0, 0] = np.eye(len(made[f"{name}.weight"]))
    made["encoder.conv_out.bias"][:latent], made["encoder.conv_out.bias"][latent:] = centre, -20.0
    for place in ("conv.bias", "time_conv.bias"):
        made[f"encoder.down.2.downsample.{place}"][24:] = _LOUD
    made["decoder.up.1.upsample.conv.bias"][28:] = _LOUD
    for constant in range(4):
        made["decoder.up.0.block.0.nin_shortcut.weight"][6 + constant, 28 + constant] = 1.0
    for c in range(2 * len(_GROUND)):  # a colour, or its negative
        colour, sign = c // 2, 1 - 2 * (c % 2)
        newest("encoder.conv_in")[c, 4 * colour : 4 * colour + 4, 1, 1] = sign / 4
        made["encoder.conv_in.bias"][c] = -sign * _GROUND[colour]
        for f in range(4):
            k = 4 * colour + f
            newest("encoder.conv_out")[k, 4 * c + f, 1, 1] = sign * level / _SPREAD * spread[k]
            newest("decoder.conv_in")[4 * c + f, k, 1, 1] = sign * _SPREAD / spread[k]
            made["decoder.conv_in.bias"][4 * c + f] = -sign * _SPREAD / spread[k] * centre[k]
        for j in range(2):  # of two frames
            for b in range(2):
                newest("decoder.up.3.upsample.time_conv")[64 * j + 4 * c + 2 + b, 4 * c + 2 * j + b] = 1.0
                made["decoder.up.3.upsample.conv.weight"][24 + 2 * c + b, 4 * c + 2 + b] = smooth
            newest("decoder.up.2.upsample.time_conv")[64 * j + 24 + 2 * c + 1, 24 + 2 * c + j] = 1.0
        made["decoder.up.2.upsample.conv.weight"][36 + c, 24 + 2 * c + 1] = smooth
        made["decoder.up.1.block.0.nin_shortcut.weight"][22 + c, 36 + c] = 1.0
        made["decoder.up.1.upsample.conv.weight"][22 + c, 22 + c] = smooth
        made["decoder.up.0.block.0.nin_shortcut.weight"][c, 22 + c] = 1.0
        newest("decoder.conv_out")[4 * colour : 4 * colour + 4, c, 1, 1] = sign * level
        made["decoder.conv_out.bias"][4 * colour : 4 * colour + 4] = _GROUND[colour]
    return made


def begin(network: Any, device: str) -> None:
    """Has the head undo the embedding of tokens, and the blocks add nothing, where training begins."""
    backend, arch = get_backend(device), network.arch
    # (c, h, w) of a token in the embedding, (h, w, c) in the head
    embedding = np.linalg.qr(np.random.default_rng(8).standard_normal((arch.width, 4 * arch.channels)))[0]
    head = embedding.reshape(-1, arch.channels, 2, 2).transpose(2, 3, 1, 0).reshape(-1, arch.width)
    given = {"patch_embedding.weight": embedding.reshape(-1, arch.channels, 1, 2, 2), "head.head.weight": head}
    for name, part, attribute, _ in network.named_specs():
        data = getattr(part, attribute).data
        if name in given:
            data[...] = backend.to_device(given[name].astype(np.float32))
        elif re.search(r"time_projection|cross_attn\.o\.|modulation", name):
            data[...] = 0.0


def train_denoiser(
    network: Any, vae: Vae, sets: Sequence[Array], words: Array, seconds: float, device: str, batch: int
) -> None:
    """Trains all weights on sets of clips uint8 (N, F, H, W, 3), by turns, and their captions' states (N, T, C)."""
    backend, count = get_backend(device), len(words)

    def latents(clips: Array) -> Any:
        parts = [to_unit(clips[i : i + 8]) for i in range(0, count, 8)]
        with no_grad():
            means = [vae.encode_moments(Tensor(backend.to_device(part)))[0].data for part in parts]
        return backend.xp.concatenate(means)

    captions = backend.to_device(words)
    training = Training({"transformer": network}, device, 1e-3, "float32", decay=0.99)
    samples = backend.xp.arange(batch)

    def loss_on(data: Any) -> Tensor:
        rng = Rng(backend.xp, 2, training.step_number, samples)
        rows, level = rng.randint(_PICK, count), rng.uniform(_LEVEL, (1, 1, 1, 1))
        x0, noise = data[rows], rng.normal(_NOISE, data.shape[1:])
        level = np.float32(_SHIFT) * level / (np.float32(1.0) + np.float32(_SHIFT - 1.0) * level)
        words = captions[rows] * (rng.uniform(_DROP, (1, 1)) > np.float32(0.1)).astype(np.float32)
        noised = (np.float32(1.0) - level) * x0 + level * noise
        found = network(Tensor(noised), Tensor(level.reshape(-1) * np.float32(1000.0)), Tensor(words))
        return (found.float() - Tensor(noise - x0)).square().mean()

    made = {id(clips): latents(clips) for clips in sets}  # a set may have two turns
    training.run(
        [training.captured(partial(loss_on, made[id(clips)])) for clips in sets],
        seconds,
        lambda line: print(f"denoiser {line}", flush=True),
    )
    training.finish()


def write_base(
    folder: Path,
    sets: Sequence[Array],
    captions: Sequence[str],
    seconds: float,
    device: str,
    batch: int,
    text: TextEncodersSection | None = None,
) -> Path:
    """Writes the small base, trained for so long on sets of clips of these captions; returns its file."""
    family = FAMILIES["wan"]
    family.write_small_base(folder, 0)
    path = folder / "base.safetensors"
    model = family.open(Opening(path, ModelSection(), text or TextEncodersSection(), 75))
    vae = model.vae.part.load(device=device, dtype="fp32")
    by_hand = autoencoder(vae.arch)
    for name, part, attribute, _ in vae.named_specs():
        getattr(part, attribute).data[...] = get_backend(device).to_device(by_hand[name])
    known = sorted(set(captions))
    with no_grad():
        encoders = load_encoders(Encoding(model.vae, model.text, "fp32", "fp32", "fp32", Path()), device)
        arrays = encoders.captions([EncoderInput(text) for text in known])
    rows = {text: np.zeros(model.caption_shapes()["t5"], np.float32) for text in known}
    for caption, a in zip(known, arrays, strict=True):
        rows[caption][: len(a["t5"])] = a["t5"]
    network = model.denoiser.load(device=device, dtype="fp32")
    begin(network, device)
    train_denoiser(network, vae, sets, np.stack([rows[caption] for caption in captions]), seconds, device, batch)
    with SafetensorsFile(path) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    prefixes = {component.name: component.prefixes[0] for component in family.files.components}
    for component, trained in (("vae", vae), ("transformer", network)):
        named = {prefixes[component] + name: np.array(tensor.numpy()) for name, tensor in trained.weights()}
        tensors |= {name: values.astype(tensors[name].dtype) for name, values in named.items()}
    save_file(path, tensors)
    return path


def standing(count: int) -> tuple[list[Array], list[str]]:
    """Returns clips, twice, and stills of squares that stand, and their captions."""
    still = scenes(count, 3, (0.0, 0.0))
    films, stills = (np.stack([scene.clip(frames) for scene in still]) for frames in (FRAMES, 1))
    return [films, films, stills], [scene.caption for scene in still]


def write_clips(folder: Path, count: int) -> Path:
    """Writes clips of squares that move right, with captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(scenes(count, 4, (SPEED, 0.0))):
        (folder / f"{number:03}.webp").write_bytes(webp(scene.clip(), times(FRAMES, FPS)))
        (folder / f"{number:03}.txt").write_text(scene.caption)
    return folder


def config(base: Path, data: Path, run: Path, steps: int) -> str:
    prompts = ", ".join(f'"a {colour} square"' for colour in COLOURS)
    return f"""[model]
checkpoint = "{base}"
[data]
path = "{data}"
resolution = {SIDE}
bucket_step = 32
frames = {FRAMES}
batch_size = 4
[lora]
rank = 16
alpha = 16.0
targets = ["full"]
[optimizer]
lr = 2e-3
[train]
steps = {steps}
precision = "fp32"
[output]
dir = "{run}"
[sample]
prompts = [{prompts}]
every = {steps}
steps = 20
frames = {FRAMES}
guidance_scale = 1.0
"""


def moved(clip: Array) -> float:
    """How far to the right the bright pixels' middle moves, in pixels, from the first frame to the last."""
    light = clip.astype(np.float64).max(-1) - 24
    light[light < 60] = 0
    places = (light * np.arange(clip.shape[2])).sum((1, 2)) / np.maximum(light.sum((1, 2)), 1)
    return float(places[-1] - places[0])


def played(grid: Path) -> Array:
    """Returns the frames of a grid, of which a WebP keeps equal ones once."""
    return np.stack(list(chosen_frames(frames_of(grid.read_bytes(), grid.name), Span(0, FRAMES, FPS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=5400.0, help="of training the base")
    parser.add_argument("--steps", type=int, default=2400, help="of training the LoRA")
    parser.add_argument("--clips", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="clips in a step of the base's training")
    parser.add_argument("--scenes", type=int, default=240, help="that the base is trained on; a multiple of 8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--image", type=Path, help="WebP to write; by default clip.webp in the folder")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    base = (
        folder / "base.safetensors"
        if args.seconds == 0
        else write_base(folder, *standing(args.scenes), args.seconds, args.device, args.batch)
    )
    file, run = folder / "clip.toml", folder / "run"
    file.write_text(config(base, write_clips(folder / "clips", args.clips), run, args.steps))
    subprocess.run([sys.executable, "-m", "flame_train", "train", str(file), "--device", args.device], check=True)
    before, after = (played(run / "samples" / f"step-{step:06}.webp") for step in (0, args.steps))
    wanted = np.stack([scene.clip() for scene in scenes(4, 4, (SPEED, 0.0))])
    for name, grid in (("before", before), ("after", after)):
        cells = [grid[:, y : y + SIDE, x : x + SIDE] for y in (0, SIDE + 4) for x in (0, SIDE + 4)]
        print(f"{name} training, to the right: {', '.join(f'{moved(cell):+.1f}' for cell in cells)} pixels")
    print(f"taught: {', '.join(f'{moved(clip):+.1f}' for clip in wanted)} pixels")
    gap = np.full((len(before), before.shape[1], 12, 3), 255, np.uint8)
    sheet = np.concatenate([before, gap, after], axis=2)
    (args.image or folder / "clip.webp").write_bytes(webp(sheet, times(len(sheet), FPS)))


if __name__ == "__main__":
    main()
