"""A hub id: what is fetched is what a diffusers folder is read for and no more; the network itself is stood in for."""

from __future__ import annotations

from fnmatch import fnmatch

import huggingface_hub as hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from flame_train.errors import ModelFileError
from flame_train.io.hub import read_of, resolve_checkpoint

READ = [
    "model_index.json", "scheduler/scheduler_config.json", "transformer/model-00001-of-00003.safetensors",
    "transformer/diffusion_pytorch_model.safetensors.index.json", "tokenizer/merges.txt", "tokenizer/vocab.json",
    "tokenizer_2/tokenizer.json", "tokenizer_3/spiece.model",
]  # fmt: skip


SPARED = [
    "flux1-dev.safetensors", "ae.safetensors", "text_encoders/t5xxl_fp16.safetensors",
    "unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.fp16.safetensors",
    "text_encoder/model.fp16-00001-of-00002.safetensors", "README.md", "vae_decoder/model.onnx",
]  # fmt: skip
WHOLE = [
    "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", "vae/model.bf16.safetensors",
    "vae/model.fp16.safetensors",
]  # fmt: skip


@pytest.fixture
def hub_with(monkeypatch, tmp_path):
    """A hub with these files, or one that is out of reach; what was fetched of them, in order."""
    fetched = []

    def has(files, cached=False):
        def listed(name):
            if files is None:
                raise OSError("no network")
            return files

        def snapshot(name, allow_patterns=None, local_files_only=False):
            if local_files_only and not cached:
                raise LocalEntryNotFoundError("nothing kept")
            fetched.append([f for f in files or [] if any(fnmatch(f, p) for p in allow_patterns or ["*"])])
            return str(tmp_path)

        monkeypatch.setattr(hub, "list_repo_files", listed)
        monkeypatch.setattr(hub, "snapshot_download", snapshot)
        return fetched

    return has


def test_what_is_read_is_fetched_and_no_more(hub_with, tmp_path):
    fetched = hub_with([*READ, *WHOLE, *SPARED])
    assert resolve_checkpoint("owner/model") == tmp_path
    assert [sorted(files) for files in fetched] == [sorted([*READ, *WHOLE])]


def test_weights_that_lie_in_no_component_are_all_there_is():
    assert read_of(["config.json", "model.safetensors", "model.fp16.safetensors"]) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    assert read_of(["unet/model.fp16.safetensors", "x.safetensors"]) == ["unet/model.fp16.safetensors"]


def test_a_name_with_brackets_is_no_pattern(hub_with):
    fetched = hub_with(["unet/a[b].safetensors", "unet/ab.safetensors"])
    resolve_checkpoint("owner/brackets")
    assert fetched == [["unet/a[b].safetensors", "unet/ab.safetensors"]]


def test_what_was_fetched_before_does_where_the_hub_is_out_of_reach(hub_with, tmp_path):
    fetched = hub_with(None, cached=True)
    assert resolve_checkpoint("owner/kept") == tmp_path
    assert len(fetched) == 1


def test_what_the_hub_does_not_have_is_told_by_name(hub_with):
    hub_with(None)
    with pytest.raises(ModelFileError, match=r"owner/nothing: neither a local path nor found on the hub .*no network"):
        resolve_checkpoint("owner/nothing")


def test_the_hub_is_asked_once_and_again_only_after_a_failure(hub_with, tmp_path):
    """Every part of a run asks where its checkpoint is: what the hub has may change meanwhile, or be out of reach."""
    hub_with(None)
    with pytest.raises(ModelFileError, match="no network"):
        resolve_checkpoint("owner/wanted-often")
    fetched = hub_with(READ)
    assert [resolve_checkpoint("owner/wanted-often") for _ in range(3)] == [tmp_path] * 3
    assert len(fetched) == 1
