"""Z-Image's denoiser: one stream of image and text, whose blocks have norms before and after (arXiv 2511.22699).

Attribute names are those of the published single file. Activations are channels-last. Image and text tokens are filled
up to multiples of 32 with a learnt token each, which is attended to. The angles by which queries and keys are turned
follow from the tokens' places.

Shape letters of images: B batch, H height and W width in latent pixels, C latent channels.
Shape letters of tokens: L image tokens, T text tokens, S = L + T, D model width, N heads, E width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import numpy as np

from flame_train.engine import Tensor, checkpoint, nn, rematerialize, tensor
from flame_train.engine import functional as F
from flame_train.engine.dtype import DType, compute_dtype, float32, int32
from flame_train.engine.nn import param
from flame_train.networks.arch import TransformerArch, block_count, shape_of
from flame_train.networks.block_network import Block, BlockNetwork, Rounded, bounded
from flame_train.networks.files.stated import NOTHING, Stated
from flame_train.networks.latents import patchify, token_grid, unpatchify
from flame_train.networks.rope import published_axes, stated_axes

UNIT: Final = 32  # a sequence's length is a multiple of this


def angles(places: np.ndarray[Any, Any], dim: int, theta: float) -> np.ndarray[Any, Any]:
    """Returns the angle of each of an axis's `dim` numbers at each place, fp64 (n, dim): two neighbours share one."""
    return np.repeat(np.outer(places, theta ** (-np.arange(0, dim, 2) / dim)), 2, axis=1)


class Turns(NamedTuple):
    """Cosine and sine (B, S, 1, E) of each token's rotary angles, those of the image first."""

    cos: Tensor
    sin: Tensor

    def part(self, begin: int, end: int) -> Turns:
        """Returns those of some tokens in a row."""
        return Turns(self.cos[:, begin:end], self.sin[:, begin:end])


class _Table(NamedTuple):
    """Cosines, or sines: (n, E0) of each place in the text, and (1, L, E - E0) of image tokens' rows and columns."""

    text: Tensor
    image: Tensor


class Positions:
    """The places of tokens on three axes: in the text, down and across the image."""

    def __init__(self, axes: tuple[int, int, int], theta: float) -> None:
        self.axes, self.theta = axes, theta
        # one entry a shape, for as long as the model lives: captured steps read them at their addresses
        self._tables: dict[tuple[int, int, int, DType, str], tuple[_Table, _Table, Tensor]] = {}

    def placed(self, rows_B: Tensor, T: int, grid: tuple[int, int], dtype: DType) -> tuple[Tensor, Tensor, Turns]:
        """Which of T text tokens are a caption's, bool (B, T), how many are seen, int32 (B,), and all rotary angles.

        A caption of n tokens takes the positions 1 to N, where N is n rounded up to a multiple of 32. The image's
        tokens have position N + 1 and their rows and columns. Tokens that fill the image up have position 0.
        """
        (B,) = rows_B.shape
        cos, sin, places_1T = self._table(T, grid, dtype, rows_B.device)
        own_B1 = rows_B.to(float32).reshape(B, 1)
        filled_B1 = F.ceil(own_B1 * (1.0 / UNIT)) * float(UNIT)
        filled_B = filled_B1.to(int32).reshape(B)
        return (
            places_1T <= own_B1,
            filled_B,
            Turns(*(_joined(table, filled_B + 1, T, grid[0] * grid[1]).unsqueeze(2) for table in (cos, sin))),
        )

    def _table(self, text: int, grid: tuple[int, int], dtype: DType, device: str) -> tuple[_Table, _Table, Tensor]:
        """Cosines and sines of places, and the text's places 1 to T, fp32 (1, T)."""
        (rows, columns), key = grid, (text, *grid, dtype, device)
        if key not in self._tables:
            a, theta = self.axes, self.theta
            first = angles(np.arange(text + 2), a[0], theta)
            down = angles(np.repeat(np.arange(rows), columns), a[1], theta)
            across = angles(np.tile(np.arange(columns), rows), a[2], theta)
            both = np.concatenate([down, across], axis=1)[None]
            cos, sin = (_Table(*(tensor(turn(x), dtype, device) for x in (first, both))) for turn in (np.cos, np.sin))
            places = tensor(np.arange(1, text + 1, dtype=np.float32)[None], device=device)
            self._tables[key] = cos, sin, places
        return self._tables[key]


def _joined(table: _Table, image_B: Tensor, T: int, L: int) -> Tensor:
    """Returns the table's values (B, S, E): L image tokens at their captions' places, filled up, and text."""
    B, first, rest = image_B.shape[0], table.text.shape[1], table.image.shape[2]
    at_B1E = F.embedding(image_B, table.text).unsqueeze(1)
    still = F.cat([table.text[:1], table.image[:, :1].reshape(1, rest)], dim=1)  # at the origin
    image = F.cat([at_B1E.expand(B, L, first), table.image.expand(B, L, rest)], dim=2)
    filling = still.unsqueeze(0).expand(B, -L % UNIT, first + rest)
    text = F.cat([table.text[1 : T + 1], still[:, first:].expand(T, rest)], dim=1)
    return F.cat([image, filling, text.unsqueeze(0).expand(B, T, first + rest)], dim=1)


PATCH: Final = 2  # the side of a token in latent pixels
_FREQUENCIES: Final = 256  # the width of the sinusoid of times
_EPS: Final = 1e-5
_FINAL_EPS: Final = 1e-6
_shape: Final = partial(shape_of, "Z-Image", "a Z-Image transformer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZImageArch(TransformerArch):
    """Everything that decides the network's shapes, and the base of its rotary frequencies."""

    refiners: int = 2
    """Blocks before the others for the image alone, and as many for the text alone."""
    hidden: int
    """The width of the gated network."""
    context_dim: int = 2560
    """Of the text encoder's output."""
    time_dim: int = 256
    time_hidden: int = 1024
    axes: tuple[int, int, int] = (32, 48, 48)
    """How many values of a head encode a token's place in the text, its row and its column."""
    theta: float = 256.0

    @classmethod
    def base(cls) -> Self:
        """Returns Z-Image, and Turbo, which was distilled from it."""
        return cls(width=3840, depth=30, hidden=10240)

    @classmethod
    def tiny(cls, context_dim: int = 32) -> Self:
        """Returns the same structure, small enough to train on a CPU."""
        return cls(
            width=64,
            depth=2,
            refiners=1,
            head_dim=32,
            hidden=160,
            context_dim=context_dim,
            time_dim=32,
            time_hidden=64,
            axes=published_axes(32),
        )

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]], stated: Stated = NOTHING) -> Self:
        """Reads the architecture, as `networks.arch` says. Refuses the variants that take images."""
        width, features = _shape(shapes, "x_embedder.weight")
        (head_dim,) = _shape(shapes, "layers.0.attention.q_norm.weight")
        arch = cls(
            width=width,
            depth=block_count(shapes, "layers"),
            refiners=block_count(shapes, "noise_refiner"),
            head_dim=head_dim,
            hidden=_shape(shapes, "layers.0.feed_forward.w1.weight")[0],
            channels=features // PATCH**2,
            context_dim=_shape(shapes, "cap_embedder.1.weight")[1],
            time_dim=_shape(shapes, "t_embedder.mlp.2.weight")[0],
            time_hidden=_shape(shapes, "t_embedder.mlp.0.weight")[0],
            axes=stated_axes(stated.values.get("axes_dims"), head_dim),
            theta=stated.number("rope_theta", 256.0),
        )
        stated.require(
            n_heads=width // head_dim,
            n_kv_heads=width // head_dim,
            axes_dims=arch.axes,
            norm_eps=_EPS,
            qk_norm=True,
            t_scale=1000.0,
            all_patch_size=(PATCH,),
            all_f_patch_size=(1,),
            siglip_feat_dim=None,
        )
        return arch


class TimestepEmbedder(nn.Module):
    """A time's sinusoid to the vector that modulates: linear, silu, linear."""

    def __init__(self, arch: ZImageArch) -> None:
        first, second = nn.Linear(_FREQUENCIES, arch.time_hidden), nn.Linear(arch.time_hidden, arch.time_dim)
        self.mlp = nn.ModuleList([first, None, second])

    def forward(self, times_B: Tensor, dtype: DType) -> Tensor:
        embedded: Tensor = self.mlp[2](F.silu(self.mlp[0](F.timestep_embedding(times_B, _FREQUENCIES, dtype=dtype))))
        return embedded


class Attention(nn.Module):
    """Attention of all tokens to the first of them, behind which is padding, with normalised queries and keys."""

    def __init__(self, arch: ZImageArch) -> None:
        self.head_dim = arch.head_dim
        self.qkv = nn.Linear(arch.width, 3 * arch.width, bias=False)
        self.out = nn.Linear(arch.width, arch.width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(arch.head_dim, _EPS) for _ in range(2))

    def forward(self, x_BSD: Tensor, cos_BS1E: Tensor, sin_BS1E: Tensor, seen_B: Tensor | None) -> Tensor:
        B, S, D = x_BSD.shape
        q, k, v = (part.reshape(B, S, -1, self.head_dim) for part in F.chunk(self.qkv(x_BSD), 3, dim=-1))
        q, k = (
            F.rms_norm_rope(x, nn.compute_copy(norm.weight), cos_BS1E, sin_BS1E, _EPS)
            for x, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        heads = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, key_value_seq_lengths=seen_B)
        return self.out(attended.transpose(1, 2).reshape(B, S, D))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): silu(w1 x) * w3 x, projected back."""

    def __init__(self, arch: ZImageArch) -> None:
        self.w1, self.w3 = (nn.Linear(arch.width, arch.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(arch.hidden, arch.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, value = nn.grouped_linear([self.w1, self.w3], x_BSD)
        return self.w2(rematerialize(_gated, gate, value))


def _gated(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


# The inputs of linear layers are rematerialized: their own inputs have the same size and are saved anyway.


def _scaled(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    normed: Tensor = F.rms_norm(x, (x.shape[-1],), weight, _EPS)
    return normed if scale is None else normed * scale


def _before(norm: nn.RMSNorm, x_BSD: Tensor, scale: Tensor | None) -> Tensor:
    return rematerialize(_scaled, x_BSD, nn.compute_copy(norm.weight), scale)


def _after(norm: nn.RMSNorm, x_BSD: Tensor, found_BSD: Tensor, gate: Tensor | None) -> Tensor:
    out: Tensor = norm(bounded(found_BSD))
    return x_BSD + out if gate is None else F.gated_add(x_BSD, gate, out)


class TransformerBlock(Block):
    """Attention and the gated network, each between two norms; scales before and gates after follow from the time."""

    def __init__(self, arch: ZImageArch, modulated: bool = True) -> None:
        self.attention = Attention(arch)
        self.feed_forward = FeedForward(arch)
        norms = (nn.RMSNorm(arch.width, _EPS) for _ in range(4))
        self.attention_norm1, self.attention_norm2, self.ffn_norm1, self.ffn_norm2 = norms
        self.modulated = modulated
        if modulated:
            self.adaLN_modulation = nn.ModuleList([nn.Linear(arch.time_dim, 4 * arch.width)])

    def forward(
        self, x_BSD: Tensor, cos_BS1E: Tensor, sin_BS1E: Tensor, seen_B: Tensor | None, time_BF: Tensor | None
    ) -> Tensor:
        """Returns the tokens after the block.

        Args:
            cos_BS1E, sin_BS1E: their rotary angles (B, S, 1, E).
            time_BF: the time's vector (B, F), for a modulated block.
        """
        scale = gate = feed_scale = feed_gate = None
        if self.modulated:
            assert time_BF is not None
            modulation = self.adaLN_modulation[0](time_BF).unsqueeze(1)
            scale, gate, feed_scale, feed_gate = F.chunk(modulation, 4, dim=-1)
            scale, feed_scale = scale + 1.0, feed_scale + 1.0
            gate, feed_gate = F.tanh(gate), F.tanh(feed_gate)
        attended = self.attention(_before(self.attention_norm1, x_BSD, scale), cos_BS1E, sin_BS1E, seen_B)
        x_BSD = _after(self.attention_norm2, x_BSD, attended, gate)
        if self.checkpointing == "mlp":
            return checkpoint(self._fed, x_BSD, feed_scale, feed_gate)
        return self._fed(x_BSD, feed_scale, feed_gate)

    def _fed(self, x_BSD: Tensor, scale: Tensor | None, gate: Tensor | None) -> Tensor:
        return _after(self.ffn_norm2, x_BSD, self.feed_forward(_before(self.ffn_norm1, x_BSD, scale)), gate)


class FinalLayer(nn.Module):
    """A scale that follows from the time, and the way back to a token's features."""

    def __init__(self, arch: ZImageArch) -> None:
        self.linear = nn.Linear(arch.width, PATCH**2 * arch.channels)
        self.adaLN_modulation = nn.ModuleList([None, nn.Linear(arch.time_dim, arch.width)])

    def forward(self, x_BLD: Tensor, time_BF: Tensor) -> Tensor:
        scale = self.adaLN_modulation[1](F.silu(time_BF)).unsqueeze(1) + 1.0
        return self.linear(F.layer_norm(x_BLD, (x_BLD.shape[-1],), None, None, _FINAL_EPS) * scale)


class ZImage(BlockNetwork):
    """Predicts x_0 - noise in noised latents, which is the negative velocity of the flow."""

    # convert_to_quant, ComfyUI-INT8-Fast and musubi-tuner leave out the modulation
    rounded = Rounded(
        ("noise_refiner.*", "context_refiner.*", "layers.*"),
        exact=frozenset(("adaLN_modulation",)),
        unless_rotated=("*.adaLN_modulation.*",),
    )

    def __init__(self, arch: ZImageArch) -> None:
        self.arch = arch
        self.positions = Positions(arch.axes, arch.theta)
        self.x_embedder = nn.Linear(PATCH**2 * arch.channels, arch.width)
        self.t_embedder = TimestepEmbedder(arch)
        norm, linear = nn.RMSNorm(arch.context_dim, _EPS), nn.Linear(arch.context_dim, arch.width)
        self.cap_embedder = nn.ModuleList([norm, linear])
        self.x_pad_token, self.cap_pad_token = (param(1, arch.width) for _ in range(2))
        self.noise_refiner = nn.ModuleList([TransformerBlock(arch) for _ in range(arch.refiners)])
        self.context_refiner = nn.ModuleList([TransformerBlock(arch, False) for _ in range(arch.refiners)])
        self.layers = nn.ModuleList([TransformerBlock(arch) for _ in range(arch.depth)])
        self.final_layer = FinalLayer(arch)

    def forward(self, x_BHWC: Tensor, times_B: Tensor, context_BTC: Tensor, rows_B: Tensor) -> Tensor:
        """Returns x_0 - noise (B, H, W, C) for noised latents, which like the states have the dtype of the weights.

        Args:
            times_B: 1000 times one minus the noise level, (B,), fp32.

        Raises:
            ShapeError: latents of other sizes.
        """
        _, h, w = token_grid("Z-Image's transformer", x_BHWC, self.arch.channels, PATCH)
        time_BF = self.t_embedder(times_B, x_BHWC.dtype)
        tokens = patchify(x_BHWC, PATCH, channels_first=False)
        x_BLD = self._filled(self.x_embedder(tokens), self.x_pad_token)
        context_BTC = F.pad(context_BTC, (0, 0, 0, -context_BTC.shape[1] % UNIT))
        L, S = x_BLD.shape[1], x_BLD.shape[1] + context_BTC.shape[1]
        dtype = compute_dtype(nn.compute_copy(self.x_pad_token).dtype)
        own_BT, seen_B, turns = self.positions.placed(rows_B, context_BTC.shape[1], (h, w), dtype)
        for block in self.noise_refiner:
            x_BLD = block(x_BLD, *turns.part(0, L), None, time_BF)
        c_BTD = self._embedded(context_BTC, own_BT)
        for block in self.context_refiner:
            c_BTD = block(c_BTD, *turns.part(L, S), seen_B, None)
        x_BSD = F.cat([x_BLD, c_BTD], dim=1)
        for block in self.layers:
            x_BSD = block(x_BSD, *turns, seen_B + L, time_BF)
        return unpatchify(self.final_layer(x_BSD[:, : h * w], time_BF), (h, w), PATCH, channels_first=False)

    def _filled(self, x_BLD: Tensor, token: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        lacking = -L % UNIT
        if not lacking:
            return x_BLD
        return F.cat([x_BLD, nn.compute_copy(token).unsqueeze(0).expand(B, lacking, D)], dim=1)

    def _embedded(self, context_BTC: Tensor, own_BT: Tensor) -> Tensor:
        """Returns the text's tokens (B, T, D), with the learnt one wherever `own_BT` is False."""
        norm, linear = self.cap_embedder
        found_BTD: Tensor = linear(norm(context_BTC))
        return F.where(own_BT.unsqueeze(-1), found_BTD, nn.compute_copy(self.cap_pad_token).unsqueeze(0))
