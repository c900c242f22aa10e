"""A table of choices refuses an entry that lacks a method, when it is found and not when a run needs it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from flame_train.diffusion.samplers import Sampler
from flame_train.settings import entries_in

ENTRY = """
from flame_train.diffusion.samplers import Sampler

class Half(Sampler):
    name = "half"
    usual_name = "Half"
"""
WHOLE = "\n    def sample(self, denoise, noise, cond, path, noise_sampler):\n        return noise\n"


def found(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> list[type[Sampler]]:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "half.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    importlib.import_module(name)
    return entries_in(name, Sampler)


def test_an_entry_without_a_method_of_its_interface_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match=r"lacking_samplers.half.Half lacks sample of Sampler"):
        found(tmp_path, monkeypatch, "lacking_samplers", ENTRY)


def test_a_whole_one_is_found(tmp_path, monkeypatch):
    assert [entry.name for entry in found(tmp_path, monkeypatch, "whole_samplers", ENTRY + WHOLE)] == ["half"]
