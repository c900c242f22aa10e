"""What SDXL's recipe refuses before anything is read, and which blocks it has recomputed."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.errors import ConfigError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.recipes import FAMILIES
from flame_train.run.plan import describe, make_plan
from flame_train.training.stop import StopRequest


@pytest.mark.parametrize(("marked", "given", "said"), [(True, "epsilon", "v"), (True, "v", ""), (False, "v", "")])
def test_a_model_that_says_it_predicts_v_is_not_trained_on_the_noise(
    small_base, small_config, tmp_path, marked, given, said
):
    """NoobAI's v models say so by a marker; a file without one may be either."""
    with SafetensorsFile(small_base) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names}
    save_file(tmp_path / "base.safetensors", tensors | ({"v_pred": np.zeros(1, np.float32)} if marked else {}))
    config = small_config(model={"checkpoint": str(tmp_path / "base.safetensors"), "prediction": given})
    if said:
        with pytest.raises(ConfigError, match=rf'says that it predicts {said}, got "{given}"; set model.prediction'):
            FAMILIES["sdxl"].check(config)
    else:
        FAMILIES["sdxl"].check(config)


def test_the_blocks_that_a_config_chooses_are_recomputed(small_config):
    def plan(**gradient):
        return make_plan(FAMILIES["sdxl"], small_config(gradient=gradient), StopRequest())

    some = {"checkpointing": True, "recompute_only": ("output_blocks.*",)}
    plans = [plan(), plan(**some), plan(checkpointing=True)]
    none, few, every = (describe(p, "cpu")["recomputed blocks"].split(" of ") for p in plans)
    assert (none[0], every[0]) == ("0", every[1])
    assert 0 < int(few[0]) < int(every[0])
    memory = [p.training_memory() for p in plans]
    assert memory == sorted(set(memory), reverse=True)
    blocks = FAMILIES["sdxl"].denoiser(plans[1].config, "cpu").model.blocks()
    run_again = {name for name, block in blocks.items() if block.recompute == "blocks"}
    assert run_again == {name for name in blocks if name.startswith("output_blocks.")}
    assert len(run_again) == int(few[0])


def test_a_choice_of_blocks_that_are_not_there_is_refused(small_config):
    config = small_config(gradient={"checkpointing": True, "recompute_only": ("mid_block.*",)})
    with pytest.raises(ConfigError, match=r"gradient\.recompute_only: .*\n  'mid_block\.\*'; near it: middle_block"):
        make_plan(FAMILIES["sdxl"], config, StopRequest())
