"""Small models of families with their text encoders, here and in diffusers, transformers and PEFT."""

from __future__ import annotations

from dataclasses import replace

import diffusers
import numpy as np
import peft
import torch

from flame_train.engine import nn, tensor
from flame_train.models.common.model import Denoiser
from flame_train.models.flux.transformer import Flux, FluxArch
from flame_train.models.registry import FAMILIES, NOTHING_NAMED
from flame_train.models.sd3.mmdit import MMDiT, MMDiTArch
from flame_train.models.sd3.names import mmdit_to_diffusers
from flame_train.models.sdxl.unet import UNet
from flame_train.networks.vae.vae import Vae, VaeArch
from flame_train.text_encoders.clip.network import ClipArch, ClipTextEncoder
from flame_train.text_encoders.running import RunningEncoder
from flame_train.text_encoders.t5.network import T5Arch, T5Encoder
from tests.parity.models import test_clip, test_t5
from tests.parity.twins import flux, sd3, sd15, sdxl

CLIP_L, BIGG = test_clip.CLIP_L, test_clip.BIGG
PROJECTED_L = ClipArch(width=48, layers=3, heads=4, hidden=96, activation="quick_gelu", projection=24)
T5 = T5Arch(width=96, layers=2, heads=4, head_dim=16, hidden=96, vocabulary=120, buckets=32)
T5_TOKENS = 9
TEXTS = ("a red circle", "a photograph of nothing at all, in oil")
KEYS = {"sdxl": ("clip_l", "clip_g"), "sd15": ("clip",), "sd3": ("clip_l", "clip_g", "t5"), "flux": ("clip_l", "t5")}
RANK, ALPHA = 4, 3.0


class Twins:
    """A model with LoRAs on its denoiser and text encoders, and PyTorch's, with the same weights and LoRAs in PEFT.

    `pairs` has each trained matrix here and there. PyTorch computes in fp64.
    """

    def __init__(self, family, fill, scrambled, attach, dtype="float32"):
        self.family = family
        networks = {name: scrambled(network, dtype, i) for i, (name, network) in enumerate(_NETWORKS[family]().items())}
        for network in networks.values():
            _spread(network)
        model = FAMILIES[family].declared(networks, NOTHING_NAMED)
        denoiser = networks[model.denoiser.component]
        self.running = tuple(RunningEncoder(e, e.part.network) for e in model.text)
        self.denoiser = Denoiser(model, denoiser, tensor(np.ones(1, np.float32)), self.running)
        self.encoders = {r.encoder.key: _torch_encoder(r.network, fill) for r in self.running}
        self.twin, table = _denoiser(family, denoiser, fill)
        joined = self.denoiser.networks(KEYS[family])
        linear = [name for name, part in denoiser.named_modules() if isinstance(part, nn.Linear)]
        targets = [name for name in linear if len(table.pull([f"{name}.weight"]).sources) == 1][3:9]
        targets += [f"{r.encoder.key}.{n}" for r in self.running for n in r.encoder.adaptable()]
        self.attached = attach(joined, targets)
        self.pairs = [pair for pairs in self._adapted(table).values() for pair in pairs]

    def _adapted(self, table):
        """PEFT's LoRAs in the twins, with our values; the pairs of matrices by our layers' names."""
        wholes = {"": self.twin} | self.encoders
        found = {}
        for key, twin in wholes.items():
            mine = {n: a for n, a in self.attached.adapters.items() if n.partition(".")[0] == key or not key}
            mine = {n: a for n, a in mine.items() if key or n.partition(".")[0] not in self.encoders}
            known = dict(twin.named_modules())
            paths = {n: _path(n.removeprefix(f"{key}."), known, None if key else table) for n in mine}
            twin.requires_grad_(False)
            peft.inject_adapter_in_model(
                peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[*paths.values()]), twin
            )
            twin.double()
            for name, adapter in mine.items():
                layer = twin.get_submodule(paths[name])
                mine_here = adapter.parameters()
                pairs = (
                    (mine_here["lora_down.weight"], layer.lora_A),
                    (mine_here["lora_up.weight"], layer.lora_B),
                )
                found[name] = [(p, q["default"].weight) for p, q in pairs]
                for p, q in found[name]:
                    q.data = torch.from_numpy(p.numpy().astype(np.float64))
        return found

    def arrays(self, seed=1):
        """A batch's conditioning: token ids, and the sizes where the family has them."""
        rng = np.random.default_rng(seed)
        made = [{} for _ in TEXTS]
        for running in self.running:
            for own, text in zip(made, TEXTS, strict=True):
                if running.encoder.key == "t5":
                    own["t5.ids"] = rng.integers(0, T5.vocabulary, T5_TOKENS).astype(np.int32)
                else:
                    own |= running.encoder.tokens(text)
        batch = {name: np.stack([own[name] for own in made]) for name in made[0]}
        sizes = {"time_ids": np.array([[64, 64, 0, 0, 64, 64]] * len(TEXTS), np.int32)}
        return batch | (sizes if self.family == "sdxl" else {})

    def ours(self, latents, t, arrays):
        cond = {name: tensor(array) for name, array in arrays.items()}
        return self.denoiser.denoise(tensor(latents), tensor(t), cond)

    def theirs(self, latents, t, arrays):
        """The reference's prediction, its text encoded by transformers."""
        made = {}
        for key, twin in self.encoders.items():
            ids = torch.from_numpy(arrays[f"{key}.ids"].astype(np.int64))
            if key == "t5":
                made["t5"] = twin(input_ids=ids).last_hidden_state
            else:
                out = twin(input_ids=ids[:, 0], output_hidden_states=True)
                made[key] = out.last_hidden_state if key == "clip" else out.hidden_states[-2]
                made[f"pooled_{key[-1]}"] = out.text_embeds if hasattr(out, "text_embeds") else out.pooler_output
        return _PREDICTIONS[self.family](self.twin, latents, t, made, arrays)


def _spread(network):
    """Embeddings of a size that the attention can tell apart."""
    for name, weight in network.weights():
        if name.endswith(("embedding.weight", "shared.weight", "relative_attention_bias.weight")):
            weight.data[...] *= 20.0


def _path(name, known, table):
    """The twin's name of a layer."""
    if table is not None:
        return next(iter(table.pull([f"{name}.weight"]).sources)).removesuffix(".weight")
    return name if name in known else name.removeprefix("text_model.")


def _torch_encoder(network, fill):
    if isinstance(network, T5Encoder):
        twin = test_t5.transformers_encoder(network.arch).double().eval()
        arrays = {name: torch.from_numpy(w.numpy().astype(np.float64)) for name, w in network.weights()}
        twin.load_state_dict(test_t5.named_twice(arrays), strict=True)
        return twin
    twin = test_clip.transformers_encoder(network.arch)
    return fill(network, twin, test_clip.to_names_of(twin))


def _denoiser(family, model, fill):
    twins, table = _DENOISERS[family]
    twin = fill(model, twins.reference(model.arch), table)
    twins.patch(twin, model.arch)
    return twin, table


def _of_unet(twin, latents, t, made, arrays):
    out = twin(
        sample=sdxl.fp64(latents).permute(0, 3, 1, 2),
        timestep=torch.from_numpy(t),
        encoder_hidden_states=torch.cat([made["clip_l"], made["clip_g"]], -1),
        added_cond_kwargs={"text_embeds": made["pooled_g"], "time_ids": torch.from_numpy(arrays["time_ids"])},
    )
    return out.sample.permute(0, 2, 3, 1)


def _of_plain_unet(twin, latents, t, made, arrays):
    out = twin(sdxl.fp64(latents).permute(0, 3, 1, 2), torch.from_numpy(t), made["clip"])
    return out.sample.permute(0, 2, 3, 1)


def _of_mmdit(twin, latents, t, made, arrays):
    clips = torch.cat([made["clip_l"], made["clip_g"]], -1)
    clips = torch.nn.functional.pad(clips, (0, T5.width - clips.shape[-1]))
    out = twin(
        hidden_states=sdxl.fp64(latents).permute(0, 3, 1, 2),
        timestep=torch.from_numpy(t) * 1000,
        encoder_hidden_states=torch.cat([clips, made["t5"]], 1),
        pooled_projections=torch.cat([made["pooled_l"], made["pooled_g"]], -1),
    )
    return out.sample.permute(0, 2, 3, 1)


def _of_flux(twin, latents, t, made, arrays):
    x = sdxl.fp64(latents).permute(0, 3, 1, 2)
    B, C, H, W = x.shape
    pipeline = diffusers.FluxPipeline
    out = twin(
        hidden_states=pipeline._pack_latents(x, B, C, H, W),
        timestep=sdxl.fp64(t),
        encoder_hidden_states=made["t5"],
        pooled_projections=made["pooled_l"],
        guidance=torch.ones(B, dtype=torch.float64),
        img_ids=pipeline._prepare_latent_image_ids(B, H // 2, W // 2, "cpu", torch.float64),
        txt_ids=torch.zeros(made["t5"].shape[1], 3, dtype=torch.float64),
    ).sample
    return pipeline._unpack_latents(out, H * 8, W * 8, 8).permute(0, 2, 3, 1)


def _sdxl_networks():
    arch = sdxl.UNetArch(
        model_channels=16,
        transformer_depth=(0, 1, 2),
        context_dim=CLIP_L.width + BIGG.width,
        adm_in_channels=BIGG.projection + 1536,
        head_dim=8,
        groups=4,
    )
    return {
        "unet": UNet(arch),
        "vae": Vae(VaeArch.tiny()),
        "text_encoder": ClipTextEncoder(CLIP_L),
        "text_encoder_2": ClipTextEncoder(BIGG),
    }


def _sd15_networks():
    arch = replace(sd15.FIRST, context_dim=CLIP_L.width)
    return {"unet": UNet(arch), "vae": Vae(VaeArch.tiny()), "text_encoder": ClipTextEncoder(CLIP_L)}


def _sd3_networks():
    arch = MMDiTArch(
        width=64,
        depth=2,
        head_dim=32,
        context_dim=T5.width,
        pooled_dim=PROJECTED_L.projection + BIGG.projection,
        positions=16,
        qk_norm=True,
        dual=(0,),
    )
    return {
        "transformer": MMDiT(arch),
        "vae": Vae(VaeArch.tiny(latent_channels=16)),
        "text_encoder": ClipTextEncoder(PROJECTED_L),
        "text_encoder_2": ClipTextEncoder(BIGG),
        "text_encoder_3": T5Encoder(T5),
    }


def _flux_networks():
    arch = FluxArch(
        width=64,
        depth=2,
        single_depth=2,
        head_dim=16,
        channels=4,
        context_dim=T5.width,
        pooled_dim=CLIP_L.width,
        guidance=True,
    )
    return {
        "transformer": Flux(arch),
        "vae": Vae(VaeArch.tiny()),
        "text_encoder": ClipTextEncoder(CLIP_L),
        "text_encoder_2": T5Encoder(T5),
    }


_NETWORKS = {"sdxl": _sdxl_networks, "sd15": _sd15_networks, "sd3": _sd3_networks, "flux": _flux_networks}
_DENOISERS = {
    "sdxl": (sdxl, sdxl.TO_DIFFUSERS),
    "sd15": (sd15, sd15.TO_DIFFUSERS),
    "sd3": (sd3, mmdit_to_diffusers(2)),
    "flux": (flux, flux.TO_DIFFUSERS),
}
_PREDICTIONS = {"sdxl": _of_unet, "sd15": _of_plain_unet, "sd3": _of_mmdit, "flux": _of_flux}
CHANNELS = {"sdxl": 4, "sd15": 4, "sd3": 16, "flux": 4}
