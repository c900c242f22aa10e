"""Bad configurations and the exact words they get; good ones and the values they give."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest

from flame_train.config.keys import keys
from flame_train.config.load import load
from flame_train.config.prompts import Prompt
from flame_train.config.render import flat
from flame_train.config.schema import Config
from flame_train.errors import ConfigError
from flame_train.optimizers import OPTIMIZERS

GOOD = '[model]\ncheckpoint = "base.safetensors"\n[data]\npath = "photos"\n[output]\ndir = "run"\n'

# One line each, put below GOOD's seven lines or as written; the report must be exactly the message.
PROMPTS = f"a list of strings, or of tables of {', '.join(Prompt.model_fields)}"

WHERE = "docs/conventions.md says where settings of other trainers went"
INSTEAD = "remove this key or change that one"

OPTIMIZER_NAMES = "one of " + ", ".join(f'"{name}"' for name in OPTIMIZERS)


def with_key(key: str) -> str:
    """The optimizers that have a key, as a message lists them."""
    return " or ".join(f'optimizer.name = "{name}"' for name, kind in OPTIMIZERS.items() if key in kind.model_fields)


BAD_LINES = [
    ("[lora]\nrnak = 4", "8: lora.rnak: unknown key; did you mean lora.rank?"),
    ("[lora]\nlr = 1e-4", "8: lora.lr: unknown key; did you mean optimizer.lr?"),
    ("[lora]\nnetwork_dim = 8", "8: lora.network_dim: unknown key; did you mean lora.rank?"),
    (
        "[optimizer]\nlearning_rate = 1",
        "8: optimizer.learning_rate: unknown key; did you mean optimizer.lr?",
    ),
    ("[train]\nmax_train_steps = 1", "8: train.max_train_steps: unknown key; did you mean train.steps?"),
    ("[trian]\nsteps = 1", "7: trian: unknown section; did you mean train?"),
    ("[zzz]\nq = 1", "7: zzz: unknown section; `flame-train init FAMILY` writes all there are"),
    ("[train]\nqqqqqq = 1", "8: train.qqqqqq: unknown key; `flame-train init FAMILY` writes all there are, " + WHERE),
    ("[lora]\nrank = 0", "8: lora.rank: expected an integer from 1 to 4096, got 0"),
    ("[lora]\nrank = 5000", "8: lora.rank: expected an integer from 1 to 4096, got 5000"),
    ("[lora]\nrank = 4.0", "8: lora.rank: expected an integer from 1 to 4096, got 4.0"),
    ("[lora]\nrank = '4'", '8: lora.rank: expected an integer from 1 to 4096, got "4"'),
    ("[lora]\nrank = true", "8: lora.rank: expected an integer from 1 to 4096, got true"),
    ("[lora]\nrank = [4]", "8: lora.rank: expected an integer from 1 to 4096, got [4]"),
    ("[lora]\nrank = {a = 1}", "8: lora.rank: expected an integer from 1 to 4096, got a table"),
    ("[lora.rank]\nx = 1", "7: lora.rank: expected an integer from 1 to 4096, got a table"),
    ("[lora]\nalpha = 0", "8: lora.alpha: expected a number > 0 and <= 1000000, got 0"),
    ("[lora]\nalpha = nan", "8: lora.alpha: expected a number > 0 and <= 1000000, got nan"),
    ("[lora]\nalpha = inf", "8: lora.alpha: expected a number > 0 and <= 1000000, got inf"),
    (
        "[lora]\nkind = 'oft'",
        '8: lora.kind: expected one of "lora", "locon", "dora", "loha", "lokr", got "oft"',
    ),
    (
        "[[lora.rules]]\nmatch = ['*']\nrnk = 3",
        "7: lora.rules: expected a list of tables of match, rank, alpha, lr, dropout, off, got [{'match': ['*'], "
        "'rnk': 3}]; in lora.rules 1: rnk: unknown key",
    ),
    (
        "[lora]\nrules = 3",
        "8: lora.rules: expected a list of tables of match, rank, alpha, lr, dropout, off, got 3; in lora.rules: "
        "input should be a valid tuple",
    ),
    (
        "[lora]\nkind = 'lokr'\ndropout = 0.1",
        '9: lora.dropout: expected 0 with lora.kind = "lokr", which has none of its own; use rank_dropout or '
        "module_dropout",
    ),
    (
        "[lora]\nmax_norm = 1.0\n[optimizer]\nname = 'schedule_free_adamw'\n[schedule]\nname = 'constant'",
        '8: lora.max_norm: expected 0 with optimizer.name = "schedule_free_adamw", got 1.0',
    ),
    (
        "[lora]\nfactor = 8",
        '8: lora.factor: expected lora.kind = "lokr" with it, got "lora"; remove this key or change that one',
    ),
    ("[lora]\ntargets = 'attention'", '8: lora.targets: expected a list of strings, got "attention"'),
    ("[lora]\ntargets = [1]", "8: lora.targets: expected a list of strings, got [1]"),
    ("[lora]\ntargets = []", "8: lora.targets: expected presets or globs, got []"),
    ("[lora]\ntargets = ['']", "8: lora.targets: expected presets or globs, got ['']"),
    ("[optimizer]\nlr = '1e-4'", '8: optimizer.lr: expected a number > 0 and <= 10, got "1e-4"'),
    (
        "[optimizer]\nlr = '0,0001'",
        '8: optimizer.lr: expected a number > 0 and <= 10, got "0,0001"; write 0.0001, with a point',
    ),
    ("[optimizer]\nlr = -1e-4", "8: optimizer.lr: expected a number > 0 and <= 10, got -0.0001"),
    (
        "[train]\nloss_scale = 'dyn'",
        '8: train.loss_scale: expected "dynamic" or a number from 1 to 16777216, got "dyn"; did you mean "dynamic"?',
    ),
    ("[train]\nloss_scale = 0", '8: train.loss_scale: expected "dynamic" or a number from 1 to 16777216, got 0'),
    (
        "[train]\nloss_scale = 128",
        '8: train.loss_scale: expected train.precision = "fp16" with it, which alone scales its loss, got "bf16"',
    ),
    (
        "[train]\nprecision = 'fp16'\nloss_scale = 128\nloss_scale_interval = 10",
        '10: train.loss_scale_interval: expected train.loss_scale = "dynamic" with it, got 128.0',
    ),
    (
        "[gradient]\nclip_norm = 0\nnormalize = true",
        "9: gradient.normalize: expected gradient.clip_norm above 0 with it: the norm that gradients are scaled to",
    ),
    (
        "[optimizer]\nlr = 2024-01-01",
        "8: optimizer.lr: expected a number > 0 and <= 10, got the date 2024-01-01",
    ),
    ("[optimizer]\nname = 'zzz'", f'8: optimizer.name: expected {OPTIMIZER_NAMES}, got "zzz"'),
    ("[optimizer]\nbetas = [0.9]", "8: optimizer.betas: expected a list of 2 numbers, got [0.9]"),
    ("[optimizer]\nbetas = [0.9, 1.0]", "8: optimizer.betas: expected each >= 0 and < 1, got [0.9, 1.0]"),
    (
        '[gradient]\nrecompute = "feed_forward"',
        "8: gradient.recompute: unknown key; did you mean gradient.checkpointing?",
    ),
    (
        '[gradient]\ncheckpoint_blocks = ["*"]',
        "8: gradient.checkpoint_blocks: expected gradient.checkpointing = "
        '"full", "offload" or "mlp" with it, got "off"',
    ),
    (
        '[loss]\ntimestep_sampling = "uniform"\nlogit_std = 2.0',
        '9: loss.logit_std: expected loss.timestep_sampling = "auto" or loss.timestep_sampling = "logit_normal" or '
        'loss.timestep_sampling = "sigmoid" with it, got "uniform"; ' + INSTEAD,
    ),
    (
        "[loss]\nmode_scale = 0.5",
        '8: loss.mode_scale: expected loss.timestep_sampling = "mode" with it, got "auto"; ' + INSTEAD,
    ),
    (
        "[loss]\nsnr_gamma = 6.0",
        '8: loss.snr_gamma: expected loss.weighting = "min_snr" or loss.weighting = "soft_min_snr" with it, '
        'got "none"; ' + INSTEAD,
    ),
    (
        '[loss]\ntimestep_sampling = "mode"\nmode_scale = 8.0',
        "9: loss.mode_scale: expected a number from 0 to 1.75, got 8.0",
    ),
    ("[optimizer]\nmomentum = 1", "8: optimizer.momentum: expected a number >= 0 and < 1, got 1"),
    (
        "[optimizer]\nmomentum = 0.9",
        "8: optimizer.momentum: expected " + with_key("momentum") + ' with it, got "adamw"; ' + INSTEAD,
    ),
    ("[optimizer]\nweight_decay = 2", "8: optimizer.weight_decay: expected a number from 0 to 1, got 2"),
    (
        "[schedule]\nname = 'step'",
        '8: schedule.name: expected one of "cosine", "constant", "cosine_restarts", "inverse_sqrt", '
        '"linear", "polynomial", "rex", "warmup_stable_decay", got "step"',
    ),
    (
        "[schedule]\nwarmup_steps = 2000",
        "8: schedule.warmup_steps: expected less than train.steps (2000), got 2000",
    ),
    (
        "[optimizer]\nname = 'AdamWScheduleFree'\n[schedule]\nname = 'constant'",
        "8: optimizer.name: expected " + OPTIMIZER_NAMES + ', got "AdamWScheduleFree"; did you mean '
        '"schedule_free_adamw"?',
    ),
    (
        "[optimizer]\nname = 'prodgy'",
        "8: optimizer.name: expected " + OPTIMIZER_NAMES + ', got "prodgy"; did you mean "prodigy"?',
    ),
    (
        "[optimizer]\nname = 'schedule_free_adamw'",
        '8: optimizer.name: expected schedule.name = "constant" with "schedule_free_adamw", which needs no decay, '
        'got "cosine"',
    ),
    (
        "[optimizer]\nname = 'schedule_free_adamw'\n[schedule]\nname = 'constant'\n[train]\nema_decay = 0.9",
        '8: optimizer.name: expected train.ema_decay = 0 with "schedule_free_adamw", which averages by itself, got 0.9',
    ),
    (
        "[optimizer]\nname = 'sgd'\nnesterov = true",
        "9: optimizer.nesterov: expected optimizer.momentum above 0 with it",
    ),
    (
        "[optimizer]\nname = 'prodigy'\ngrowth_rate = 0.5",
        "9: optimizer.growth_rate: expected 0, which is any, or a number above 1, got 0.5",
    ),
    ("[schedule]\nwarmup = 1.0", "8: schedule.warmup: expected a number >= 0 and < 1, got 1.0"),
    (
        "[schedule]\nwarmup_steps = 3\nwarmup = 0.1",
        "9: schedule.warmup: expected this or schedule.warmup_steps (3), got both; remove one",
    ),
    (
        "[schedule]\nname = 'warmup_stable_decay'\nwarmup = 0.5\ndecay = 0.75",
        "10: schedule.decay: expected at most the 1000 steps that the warm-up leaves, got 0.75 of 2000 steps",
    ),
    ("[schedule]\nmin_lr = 0.1", "8: schedule.min_lr: expected at most optimizer.lr (0.0001), got 0.1"),
    (
        "[schedule]\ncycles = 2",
        '8: schedule.cycles: expected schedule.name = "cosine_restarts" with it, got "cosine"; ' + INSTEAD,
    ),
    (
        "[schedule]\npower = 2.0",
        '8: schedule.power: expected schedule.name = "polynomial" with it, got "cosine"; ' + INSTEAD,
    ),
    ("[gradient]\naccumulation = 0", "8: gradient.accumulation: expected an integer >= 1, got 0"),
    (
        "[gradient]\ncheckpointing = 1",
        '8: gradient.checkpointing: expected one of "off", "full", "offload", "mlp", got 1',
    ),
    (
        "[gradient]\ncheckpointing = 'no'",
        '8: gradient.checkpointing: expected one of "off", "full", "offload", "mlp", got "no"',
    ),
    ("[train]\nsteps = 0", "8: train.steps: expected an integer from 1 to 100000000, got 0"),
    ("[train]\nseed = -1", "8: train.seed: expected an integer from 0 to 9223372036854775807, got -1"),
    (
        "[train]\nprecision = 'BF16'",
        '8: train.precision: expected one of "fp32", "bf16", "fp16", got "BF16"; did you mean "bf16"?',
    ),
    (
        "[loss]\nzero_terminal_snr = true",
        '8: loss.zero_terminal_snr: expected model.prediction = "v" with it: '
        "an epsilon model learns nothing from pure noise",
    ),
    ("[loss]\noffset_noise = 2.0", "8: loss.offset_noise: expected a number from 0 to 1, got 2.0"),
    ("[checkpoint]\nkeep = -1", "8: checkpoint.keep: expected an integer >= 0, got -1"),
    ("[sample]\nwidth = 100", "8: sample.width: expected an integer from 0 to 8192, a multiple of 8, got 100"),
    (
        "[sample]\nprompts = 'a dog'",
        f'8: sample.prompts: expected {PROMPTS}, got "a dog"; in sample.prompts: input should be a valid tuple',
    ),
    ('[sample]\nprompts = ["a\\u0000"]', "8: sample.prompts: expected text, got a NUL character in it"),
    (
        "[optimizer]\nname = 'sgd'\nbetas = [0.5, 0.5]",
        "9: optimizer.betas: expected " + with_key("betas") + ' with it, got "sgd"; ' + INSTEAD,
    ),
    (
        "[optimizer]\nname = 'sgd'\neps = 1e-6",
        "9: optimizer.eps: expected " + with_key("eps") + ' with it, got "sgd"; ' + INSTEAD,
    ),
    (
        "[schedule]\nname = 'constant'\nmin_lr = 1e-5",
        '9: schedule.min_lr: expected a schedule.name that decays with it, got "constant"',
    ),
    ("[gradient]\nnoise_decay = 1", "8: gradient.noise_decay: expected gradient.noise_std above 0 with it"),
    ("[gradient]\nnoise_std = 1e300", "8: gradient.noise_std: expected a number from 0 to 1000, got 1e+300"),
    ("[loss]\nshift = 1e300", "8: loss.shift: expected a number from 0 to 100, got 1e+300"),
    (
        "[loss]\nmin_timestep = 500\nmax_timestep = 500",
        "8: loss.min_timestep: expected less than loss.max_timestep (500), got 500",
    ),
    ("[loss]\nmax_timestep = 1001", "8: loss.max_timestep: expected an integer from 1 to 1000, got 1001"),
    (
        "[loss]\ntimestep_sampling = 'list'\ntimestep_list = [3, 1000]",
        "9: loss.timestep_list: expected timesteps from 0 to 999, got 1000",
    ),
    ("[loss]\ntimestep_sampling = 'list'", "7: loss.timestep_list: expected at least one timestep, got none"),
    (
        "[loss]\ntimestep_sampling = 'list'\ntimestep_list = [3]\nmax_timestep = 10",
        '10: loss.min_timestep: has no effect with loss.timestep_sampling = "list"; remove it, or change that',
    ),
    (
        "[loss]\nhuber_c = 0.2",
        '8: loss.huber_c: expected loss.kind = "huber" or loss.kind = "smooth_l1" with it, got "mse"; ' + INSTEAD,
    ),
    ("[loss]\noffset_noise_random = true", "8: loss.offset_noise_random: expected loss.offset_noise above 0 with it"),
    (
        "[loss]\npyramid_noise_discount = 0.5",
        "8: loss.pyramid_noise_discount: expected loss.pyramid_noise above 0 with it",
    ),
    (
        "[loss]\ninput_perturbation_random = true",
        "8: loss.input_perturbation_random: expected loss.input_perturbation above 0 with it",
    ),
    (
        "[loss]\nimmiscible_noise = true",
        "8: loss.immiscible_noise: expected data.batch_size from 2 to 64 with it, got 1",
    ),
    ("[loss]\nlogit_mean = -11", "8: loss.logit_mean: expected a number from -10 to 10, got -11"),
    ("[loss]\nlogit_std = 11", "8: loss.logit_std: expected a number > 0 and <= 10, got 11"),
    ("[sample]\nguidance_scale = 1001", "8: sample.guidance_scale: expected a number from 0 to 1000, got 1001"),
    (
        "[sample]\nguidance_scale = 0.5",
        "8: sample.guidance_scale: expected 0, the model's own, or a number >= 1, got 0.5",
    ),
    ("data.repeats = 2", "7: output.data: unknown key; `flame-train init FAMILY` writes all there are, " + WHERE),
    (
        "[train]\nseed = 0x" + "f" * 9000,
        "8: expected TOML, got a number of too many digits; write a shorter one",
    ),
]

BAD_FILES = [
    (
        "format = 2\n" + GOOD,
        "x.toml:1: format: expected 1, the format of configs that this version reads, got 2; write a new file with "
        "`flame-train init` and copy the settings, or use the version of flame-train that wrote this one",
    ),
    ("format = true\n" + GOOD, "x.toml:1: format: expected 1"),
    ("rank = 4\n" + GOOD, "x.toml:1: rank: unknown key; did you mean lora.rank?"),
    ("lora = 4\n" + GOOD, "x.toml:1: lora: expected a table of keys, got 4"),
    (
        '[data]\npath = "D:\\Users\\me"\n',
        'x.toml:2:13: expected text without a single backslash, got sers\\me" in the line `path = "D:\\Users\\me"`; '
        "between double quotes a backslash is special: use single quotes for paths with it, or / instead",
    ),
    ("a = " + "[" * 5000, "x.toml: expected at most 16 levels of lists and tables"),
    (
        "a = " + "9" * 5000,
        "x.toml:1: expected TOML, got a number of too many digits; write a shorter one",
    ),
    ("extends = 3\n", "x.toml:1: extends: expected the path of another config, got 3"),
    ("extends = 'x.toml'\n", "x.toml: expected a chain of extends that ends, but it comes back to this file"),
    ("extends = 'gone.toml'\n", "x.toml:1: extends: gone.toml: no such file"),
]

YAML_GOOD = "model: {checkpoint: base.safetensors}\ndata: {path: photos}\noutput: {dir: run}\n"

BAD_YAML = [
    (
        'sample: {prompts: ["\\ud800"]}',
        "4: sample.prompts: expected UTF-8 text, got a byte that is none, or half a surrogate pair",
    ),
    ("lora: {rank: no}", '4: lora.rank: expected an integer from 1 to 4096, got "no"'),
    ("lora:\n  rank: 4\n  rank: 8", "6: expected each key once, got rank again (first on line 5)"),
    ("lora:\n  rnak: 4", "5: lora.rnak: unknown key; did you mean lora.rank?"),
    (
        "lora: !!python/object:os.system {}",
        "4: expected plain values, got the tag tag:yaml.org,2002:python/object:os.system; remove it",
    ),
    ("lora: !x {}", "4: expected plain values, got the tag !x; remove it"),
    ("lora: &a\n  rank: 4", "4: expected plain values, got an anchor or alias (& or *); write the value out"),
    ("lora: *a", "4: expected plain values, got an anchor or alias (& or *); write the value out"),
    (
        "lora:\n\trank: 4",
        "5: expected YAML, got a syntax error: found character '\\t' that cannot start any token",
    ),
    ("? [a]\n: 1", "4: expected a name as key"),
    ("---\na: 1", "4: expected one document, got a second one"),
    ("lora: " + "[" * 40 + "]" * 40, "4: expected at most 32 levels of nesting"),
    ("optimizer: {lr: .nan}", "4: optimizer.lr: expected a number > 0 and <= 10, got nan"),
    ("optimizer: {lr: 2024-01-01}", '4: optimizer.lr: expected a number > 0 and <= 10, got "2024-01-01"'),
    ("optimizer: {lr: }", "4: optimizer.lr: expected a number > 0 and <= 10, got nothing"),
    ("lora: 3", "4: lora: expected a table of keys, got 3"),
]

BAD_SETS = [
    ("lora.rank", "--set: lora.rank: expected section.key=value, got no ="),
    ("lora.rnak=4", "--set: lora.rnak: unknown key; did you mean lora.rank?"),
    ("rank=4", "--set: rank: unknown key; did you mean lora.rank?"),
    ("lora.rank=four", '--set: lora.rank: expected an integer from 1 to 4096, got "four"'),
    ("lora.rank=", '--set: lora.rank: expected an integer from 1 to 4096, got ""'),
    ("lora.rank=4\nx = 1", '--set: lora.rank: expected an integer from 1 to 4096, got "4\\nx = 1"'),
    ("output.dir=", "--set: output.dir: expected the run folder, got nothing"),
    (
        "schedule.warmup_steps=2000",
        "--set: schedule.warmup_steps: expected less than train.steps (2000), got 2000",
    ),
    (
        "data.max_bucket=65536",
        "--set: data.max_bucket: expected an integer from 0 to 32768, a multiple of 8, got 65536",
    ),
    ("lora=3", "--set: lora: expected section.key=value, got a section"),
    (
        "output.dir=run-\udcff",
        "--set: output.dir: expected UTF-8 text, got a byte that is none, or half a surrogate pair",
    ),
]


def report(path: Path | str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(str(path), overrides)
    return str(caught.value)


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "x.toml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def test_products_are_of_the_format_that_weights_are_stored_in() -> None:
    write(GOOD)
    for stored, more in (("fp8", ""), ("nf4", ", whose weights are decoded to train.precision for each product")):
        told = report("x.toml", (f"model.quantize={stored}", "model.arithmetic=int8"))
        assert told.endswith(f'model.arithmetic: expected model.quantize = "int8" with it, got "{stored}"{more}')
    load("x.toml", ("model.quantize=int8", "model.arithmetic=int8"))


def test_a_kind_of_adapter_that_the_format_cannot_hold_is_refused() -> None:
    for lora, form, said in (
        ("kind = 'loha'", "both", 'expected "kohya" with LoHa, which diffusers does not read, got "both"'),
        ("kind = 'lokr'", "diffusers", 'expected "kohya" with LoKr, which diffusers does not read, got "diffusers"'),
        (
            "kind = 'dora'",
            "diffusers",
            'expected "kohya" with norms of input columns, which diffusers does not read, got "diffusers"; or set '
            "lora.wd_on_output = true",
        ),
    ):
        text = f"{GOOD}format = '{form}'\n[lora]\n{lora}\n"
        assert report(write(text)) == f"x.toml:7: output.format: {said}"


@pytest.mark.parametrize(("lines", "message"), BAD_LINES)
def test_a_bad_line_gets_its_message(lines: str, message: str) -> None:
    assert report(write(GOOD + lines + "\n")) == f"x.toml:{message}"


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_bad_file_gets_its_message(text: str, message: str) -> None:
    assert report(write(text)).startswith(message)


@pytest.mark.parametrize(("lines", "message"), BAD_YAML)
def test_bad_yaml_gets_its_message(lines: str, message: str) -> None:
    assert report(write(YAML_GOOD + lines + "\n", "x.yaml")) == f"x.yaml:{message}"


@pytest.mark.parametrize(("override", "message"), BAD_SETS)
def test_a_bad_override_gets_its_message(override: str, message: str) -> None:
    assert report(write(GOOD), (override,)) == message


def test_all_problems_come_in_one_report_in_the_order_of_the_files() -> None:
    write("[lora]\nrank = 0\n[train]\nsteps = 5\n", "base.toml")
    write("extends = 'base.toml'\n[lora]\nalpha = 0\n[schedule]\nwarmup_steps = 7\n[nope]\n")
    assert report("x.toml", ("optimizer.lr=fast",)).splitlines() == [
        "base.toml:2: lora.rank: expected an integer from 1 to 4096, got 0",
        "x.toml: model.checkpoint: expected the base model: .safetensors file, diffusers folder, "
        "hf:owner/name or hf:owner/name/file, got nothing",
        "x.toml: data.path: expected the folder of images with captions or metadata.jsonl, got nothing",
        "x.toml: output.dir: expected the run folder, got nothing",
        "x.toml:3: lora.alpha: expected a number > 0 and <= 1000000, got 0",
        "x.toml:5: schedule.warmup_steps: expected less than train.steps (5), got 7",
        "x.toml:6: nope: unknown section; `flame-train init FAMILY` writes all there are",
        '--set: optimizer.lr: expected a number > 0 and <= 10, got "fast"',
    ]


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        (
            "x.toml",
            b"[lora]\nrank = \xff",
            "x.toml:2: expected UTF-8 text, got the byte 0xff; save the file as UTF-8",
        ),
        (
            "x.toml",
            "rank = 4".encode("utf-16"),
            "x.toml: expected UTF-8 text, got UTF-16; save the file as UTF-8",
        ),
        (
            "x.toml",
            b"#" * (50 << 20),
            "x.toml: expected a configuration of at most 1 MiB, got more; is this the right file?",
        ),
        ("x.json", b"{}", "x.json: expected a file ending in .toml, .yaml or .yml, got .json"),
        ("config", b"", "config: expected a file ending in .toml, .yaml or .yml, got no ending"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(name: str, raw: bytes, message: str) -> None:
    Path(name).write_bytes(raw)
    assert report(name) == message


def test_a_missing_file_a_folder_and_an_impossible_name_are_refused() -> None:
    assert report("gone.toml") == "gone.toml: no such file; `flame-train init` writes a template"
    Path("dir.toml").mkdir()
    assert report("dir.toml") == "dir.toml: expected a configuration file, got a folder"
    assert report("a\0b.toml") == (
        "'a\\x00b.toml': expected the path of a configuration file, got a NUL character in it"
    )


@pytest.mark.parametrize("escape", [r"\U00110000", r"\UFFFFFFFF", r"\ud800", r"\udfff"])
@pytest.mark.parametrize("line", ['lora: {rank: "X"}', 'lora: {"X": 1}', '"X": {}', '- "X"'])
def test_yaml_escapes_that_stand_for_no_character_are_refused(escape: str, line: str) -> None:
    told = report(write(YAML_GOOD + line.replace("X", escape) + "\n", "x.yaml"))
    assert re.match(r"x\.yaml(:\d+)?: .*expected ", told), told


def test_yaml_that_would_grow_without_end_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))
    assert "anchor" in report(write(bomb, "x.yaml"))


def test_yaml_and_toml_give_the_same_configuration() -> None:
    toml = GOOD + "[optimizer]\nlr = 1e-5\n[sample]\nprompts = ['no', 'a: b']\n[train]\nseed = 0o17\n"
    yaml = YAML_GOOD + 'optimizer:\n  lr: 1e-5\nsample:\n  prompts: [no, "a: b"]\ntrain: {seed: 0o17}\n'
    assert load(write(toml)) == load(write(yaml, "x.yml"))


def test_extends_layers_one_file_over_another_relative_to_itself() -> None:
    Path("lib").mkdir()
    write("lora: {rank: 8, alpha: 2.0}\n", "lib/deep.yaml")
    write("extends = 'deep.yaml'\n[lora]\nrank = 9\n[train]\nseed = 1\n", "lib/base.toml")
    config = load(write("extends = 'lib/base.toml'\n" + GOOD + "[train]\nseed = 2\n"))
    assert (config.lora.rank, config.lora.alpha, config.train.seed) == (9, 2.0, 2)


@pytest.mark.parametrize(("cycles", "good"), [(7, True), (8, False)])
def test_a_rate_cannot_restart_more_often_than_it_has_steps(cycles: int, good: bool) -> None:
    schedule = f"[schedule]\nname = 'cosine_restarts'\nwarmup_steps = 3\ncycles = {cycles}\n[train]\nsteps = 10\n"
    if good:
        assert load(write(GOOD + schedule)).schedule.cycles == cycles
    else:
        message = "x.toml:10: schedule.cycles: expected at most the 7 steps that the warm-up leaves, got 8"
        assert report(write(GOOD + schedule)) == message


def test_a_list_that_cannot_be_read_is_not_one_text() -> None:
    for raw in ("[a,b]", "['a', b]", '["a" "b"]'):
        assert f"sample.prompts: expected {PROMPTS}, got" in report(write(GOOD), (f"sample.prompts={raw}",))
    assert load(write(GOOD), ["sample.prompts=[v] dog"]).sample.prompts == (Prompt(text="[v] dog"),)


def test_a_tilde_is_the_users_home_in_every_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In files, overrides and names of configs alike; what is resolved says where it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    places = [key.path for key in keys().values() if key.place]
    config = load(write(GOOD), ["data.masks=files", *(f"{path}=~/{path}" for path in places)])
    there = {path: str(tmp_path / path) for path in places}
    expected = {path: (place,) if keys()[path].is_list else place for path, place in there.items()}
    assert {path: flat(config)[path] for path in places} == expected
    write("extends = '~/base.toml'\n[model]\nvae = '~/v'\n", "over.toml")
    (tmp_path / "base.toml").write_text(GOOD)
    assert load("~/over.toml").model.vae == str(tmp_path / "v")
    assert load(write(GOOD), ["sample.prompts=~/x"]).sample.prompts == (Prompt(text="~/x"),)


def test_overrides_are_typed_by_the_schema() -> None:
    overrides = (
        "data.path=other photos",
        "data.caption=3",
        "model.qwen_edit=2511",
        'output.dir="a\\tb"',
        "lora.rank=1_024",
        "lora.alpha=4",
        "lora.targets=attention",
        'sample.prompts=["one", "two"]',
        "optimizer.betas=[0.5, 0.75]",
        "gradient.accumulation=2",
        "data.upscale=true",
        "train.steps=7",
        "train.steps=8",
    )
    config = load(write(GOOD), overrides)
    assert (config.data.path, config.data.caption, config.output.dir) == ("other photos", "3", "a\tb")
    assert config.model.qwen_edit == "2511"
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (1024, 4.0, ("attention",))
    assert ([p.text for p in config.sample.prompts], config.optimizer.betas) == (["one", "two"], (0.5, 0.75))
    assert (config.gradient.accumulation, config.data.upscale) == (2, True)
    assert config.train.steps == 8


@pytest.mark.parametrize("name", ["AdamW", "adamw", "ADAMW", "Lion", "Prodigy"])
def test_a_choice_is_read_in_any_case(name: str) -> None:
    assert load(write(GOOD + f"[optimizer]\nname = '{name}'\n")).optimizer.name == name.lower()
    assert load(write(GOOD), [f"optimizer.name={name}"]).optimizer.name == name.lower()


def test_standard_input_is_toml(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        def __init__(self, text: str) -> None:
            self.buffer = io.BytesIO(text.encode())

    monkeypatch.setattr("sys.stdin", Stdin("\ufeff" + GOOD.replace("\n", "\r\n")))
    assert load("-").data.path == "photos"
    monkeypatch.setattr("sys.stdin", Stdin("rank = 4\n" + GOOD))
    assert report("-") == "standard input:1: rank: unknown key; did you mean lora.rank?"


def test_the_schema_is_complete() -> None:
    """Every key explains itself, no other name of it is a key, and its default satisfies its own bounds."""
    for path, key in keys().items():
        assert key.doc, path
        assert not key.doc.endswith("."), path
        assert not set(key.aka) & {other.name for other in keys().values() if other.section == key.section}, path
    Config.model_validate(Config().model_dump())
