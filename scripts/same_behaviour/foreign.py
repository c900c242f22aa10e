"""Configs of other trainers, for each family by the names that these may give it: what `import` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from world import World, program

_KOHYA: Final = """\
pretrained_model_name_or_path = "{base}"
train_data_dir = "{images}"
output_dir = "out"
output_name = "mine"
resolution = "768,768"
network_module = "networks.lora"
network_dim = 8
network_alpha = 4
learning_rate = 2e-4
unet_lr = 1e-4
max_train_steps = 700
optimizer_type = "AdamW8bit"
mixed_precision = "bf16"
fp8_base = true
blocks_to_swap = 6
discrete_flow_shift = 3.0
timestep_sampling = "shift"
caption_extension = ".txt"
"""
_TOOLKIT: Final = """\
job: extension
config:
  name: mine
  process:
    - type: sd_trainer
      network: {{type: lora, linear: 16, linear_alpha: 16}}
      datasets: [{{folder_path: "{images}", caption_ext: txt, resolution: [512, 768]}}]
      train: {{batch_size: 1, steps: 900, lr: 1e-4, optimizer: adamw8bit, noise_scheduler: flowmatch, dtype: bf16}}
      model: {{name_or_path: "{base}", arch: "{family}", quantize: true}}
"""
_ONE_TRAINER: Final = """\
{{"base_model_name": "{base}", "model_type": "{family}", "training_method": "LORA", "learning_rate": 0.0003,
"epochs": 10, "batch_size": 2, "resolution": "512", "lora_rank": 16, "lora_alpha": 1.0, "peft_type": "LORA",
"optimizer": {{"optimizer": "ADAMW"}}, "concepts": [{{"path": "{images}", "name": "x"}}]}}
"""
_PIPE: Final = """\
output_dir = "out"
epochs = 5
micro_batch_size_per_gpu = 1
[model]
type = "{family}"
checkpoint_path = "{base}"
dtype = "bfloat16"
[adapter]
type = "lora"
rank = 32
[optimizer]
type = "adamw_optimi"
lr = 2e-5
"""
_OTHERS: Final = {"kohya.toml": _KOHYA, "toolkit.yaml": _TOOLKIT, "one_trainer.json": _ONE_TRAINER, "pipe.toml": _PIPE}
_NAMES: Final = {
    "sdxl": ("sdxl", "STABLE_DIFFUSION_XL_10_BASE"),
    "sd3": ("sd3", "STABLE_DIFFUSION_35"),
    "flux": ("flux", "FLUX_DEV_1"),
    "zimage": ("zimage", "Z_IMAGE", "z_image"),
    "flux2": ("flux2_klein_4b", "FLUX_2", "flux2"),
    "flux3": ("flux3", "FLUX_3"),
    "chroma": ("chroma", "CHROMA_1"),
    "krea2": ("krea2", "KREA_2"),
    "anima": ("anima", "ANIMA"),
    "qwenimage1": ("qwen_image", "QWEN"),
    "qwenimage": ("qwen_image_2", "QWEN_2"),
}
"""What other trainers may call a family."""


def imports(world: World) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each config, with the family told and untold."""

    def imported(name: str, family: str, called: str, *more: str) -> dict[str, Any]:
        file = world.own / name
        file.write_text(_OTHERS[name].format(base=world.base(family), images=world.images, family=called))
        out = world.own / "mine.toml"
        out.unlink(missing_ok=True)
        found = program(world, "import", str(file), "-o", str(out), "--verbose", *more)
        return found | {"config": out.read_text() if out.exists() else None}

    for name in _OTHERS:
        for family, all_names in _NAMES.items():
            for called in all_names:
                yield f"{name} {called}", partial(imported, name, family, called)
            yield f"{name} for {family}", partial(imported, name, family, all_names[0], "--family", family, "--partial")
