"""What SDXL's recipe refuses before anything is read."""

from __future__ import annotations

import numpy as np
import pytest

from flame_train.errors import ConfigError
from flame_train.io.safetensors import SafetensorsFile, save_file
from flame_train.recipes import RECIPES


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
            RECIPES["sdxl"].check(config)
    else:
        RECIPES["sdxl"].check(config)
