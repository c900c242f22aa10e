"""What the public repository's host reads has the form that it expects."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORMS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.compose-spec": "compose.yaml",
}


@pytest.mark.parametrize("schema", FORMS)
def test_it_has_the_form_that_its_reader_expects(schema):
    files = [str(path) for path in sorted(ROOT.glob(FORMS[schema]))]
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
