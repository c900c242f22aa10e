"""A hub id: what is fetched is all that a diffusers folder is read for, the network itself being stood in for."""

from __future__ import annotations

from fnmatch import fnmatch

import huggingface_hub as hub
import pytest

from flame_train.errors import ModelFileError
from flame_train.io.hub import resolve_checkpoint

READ = [
    "model_index.json", "scheduler/scheduler_config.json", "transformer/model-00001-of-00003.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json", "tokenizer/merges.txt", "tokenizer/vocab.json",
    "tokenizer_2/tokenizer.json", "tokenizer_3/spiece.model",
]  # fmt: skip


def test_everything_that_is_read_is_fetched(monkeypatch, tmp_path):
    asked = {}

    def fetch(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert resolve_checkpoint("owner/model") == tmp_path
    (wanted,) = asked.values()
    assert [file for file in READ if not any(fnmatch(file, pattern) for pattern in wanted)] == []
    assert not any(fnmatch("unet/diffusion_pytorch_model.bin", pattern) for pattern in wanted)


def test_what_the_hub_does_not_have_is_told_by_name(monkeypatch):
    def fetch(name, allow_patterns):
        raise OSError("no such repository")

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    with pytest.raises(ModelFileError, match=r"owner/nothing: neither a local path nor found on the hub .*no such rep"):
        resolve_checkpoint("owner/nothing")


def test_the_hub_is_asked_once_and_again_only_after_a_failure(monkeypatch, tmp_path):
    """Every part of a run asks where its checkpoint is: what the hub has may change meanwhile, or be out of reach."""
    asked = []

    def fetch(name, allow_patterns):
        asked.append(name)
        if len(asked) == 1:
            raise OSError("no network")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    with pytest.raises(ModelFileError, match="no network"):
        resolve_checkpoint("owner/wanted-often")
    assert [resolve_checkpoint("owner/wanted-often") for _ in range(3)] == [tmp_path] * 3
    assert asked == ["owner/wanted-often"] * 2
