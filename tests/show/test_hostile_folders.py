"""A run folder that somebody else filled: the pages answer all the same, and what makes no sense stays empty."""

from __future__ import annotations

import http.client
import json
import os
from urllib.parse import quote

import pytest

from flame_train.errors import ConfigError
from flame_train.show.report import REPORT
from flame_train.show.serve import listening

HUGE = "1" + "0" * 400
WILD = (HUGE, "-" + HUGE, "1e999", "-Infinity", "NaN", "1e300", "9" * 4000, "null", "true", '"x"', '"\\ud800"', "[]")
WILD += ("{}", "[" * 15 + "]" * 15, '{"\\ud800": 1e999}', "[" * 9000, "9" * 9000, "-1", "0.5", "9223372036854775808")
ROW = '{{"file": {0}, "set": {0}, "original": "200x100", "resized": "128x64", "bucket": "64x64", "captions": [{0}]'
PLACES = {
    "log.jsonl": (
        '{{"step": 41, "loss": {0}, "epoch": {0}, "memory": {0}, "lr": {0}, "d": {0}, "\\ud800": 1, '
        '"validation": {{"loss": {0}, "bands": {{"0-50": {0}, "' + "9" * 5000 + '-1": 1}}}}, "images": {0}}}\n'
        '{{"step": {0}, "loss": 1}}\n'
    ),
    "status.json": '{{"state": {0}, "step": {0}, "version": {0}, "steps_per_s": {0}, "pid": {0}}}',
    "images.json": (
        '{{"images": [{{"file": {0}, "relative_loss": {0}, "seen": {0}}}, '
        '{{"file": "a.png", "relative_loss": {0}, "seen": {0}}}], '
        '"bands": [{{"levels": {0}, "loss": {0}, "samples": {0}}}, '
        '{{"levels": "' + "9" * 5000 + '-1", "loss": 1, "samples": 1}}]}}'
    ),
    "dataset.json": f'[{ROW}, "mask": {{0}}, "crop": {{{{"left": {{0}}, "top": {{0}}}}}}}}}}, {{0}}]',
}
TOML = (
    "a = 1" + "0" * 5000,
    "[data]\nresolution = 0x" + "f" * 20_000,
    "[data]\ncontrol = 5\nsets = 5\n[sample]\nprompts = 5",
    "[data]\ncontrol = [[1], {a = 1}]\nsets = [1, [2]]\n[sample]\nprompts = [1, [], {text = 5, width = 1e999}]",
    "[optimizer]\nname = []\nlr = 1979-05-27\n[train]\nsteps = 1979-05-27T07:32:00Z\n[sample]\nwidth = inf",
    "[" + ".".join("a" * 3000) + "]",
    "a = " + "[" * 900 + "]" * 900,
    '["\\u0001"]\n"\\u0001 = 1" = {"a b" = 1, "\\"" = [nan]}',
)


def answers(port, *names):
    """The status of the pages of the runs called so, and what the first says of itself."""
    found, said = [], {}
    paths = ["/", "/compare?" + "&".join(f"name={quote(name)}" for name in names)]
    paths += ["/compare.json?" + "&".join(f"name={quote(name)}" for name in names)]
    paths += [f"/{page}?name={quote(names[0])}" for page in ("run", "run.json", "dataset")]
    for path in paths:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers={"Host": f"127.0.0.1:{port}"})
        answer = connection.getresponse()
        raw = answer.read()
        found.append(answer.status)
        if path.startswith("/run.json") and answer.status == 200:
            said = said or json.loads(raw)
        connection.close()
    return found, said


def test_a_file_whose_name_is_not_utf8_is_listed_and_saved(made, serve):
    run = made()
    (run.folder / os.fsdecode(b"not-\xff.txt")).write_bytes(b"theirs")
    port = serve(run.folder)
    found, said = answers(port, "run")
    assert set(found) <= {200, 307}
    assert "not-\\xff.txt" in said["sections"]["files"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/file?name=run&path={quote('not-' + chr(92) + 'xff.txt')}")
    assert connection.getresponse().read() == b"theirs"
    connection.close()


def test_wild_values_in_the_files_of_a_run_leave_its_part_empty(made, serve):
    run, other = made("wild"), made("other")
    log = (run.folder / "log.jsonl").read_text()
    port = serve(run.folder, other.folder)
    wrong = []
    for value in WILD:
        for name, written in PLACES.items():
            (run.folder / name).write_text((log if name == "log.jsonl" else "") + written.format(value))
        found, _ = answers(port, "wild", "other")
        wrong += [f"{value[:20]}: {found}"] if set(found) != {200} else []
        run.report()
    assert wrong == []


def test_wild_configs_leave_their_part_empty(made, serve):
    run, other = made("wild"), made("other")
    port = serve(run.folder, other.folder)
    wrong = []
    for text in TOML:
        (run.folder / "config.toml").write_text(text)
        found, _ = answers(port, "wild", "other")
        wrong += [f"{text[:20]}: {found}"] if set(found) != {200} else []
        assert run.report().name == REPORT
    assert wrong == []


@pytest.mark.parametrize("host", ["fe80::1%lo", "fe80::1%nowhere", "203.0.113.7"])
def test_an_address_of_another_machine_is_refused(host):
    with pytest.raises(ConfigError, match="no such address"):
        listening(0, host).close()
