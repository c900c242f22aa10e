"""The generated page of ops is what the registry says now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_ops_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("gen_ops", ROOT / "scripts" / "gen_ops.py")
    assert spec is not None
    assert spec.loader is not None
    gen_ops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_ops)
    written = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    assert written == gen_ops.page(), "run scripts/gen_ops.py"
