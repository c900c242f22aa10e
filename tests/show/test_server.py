"""The server: for this machine's browser alone, files of the run folder alone, and nothing that changes anything."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

import numpy as np
import pytest
from PIL import Image

from flame_train import cli
from flame_train.data.grid import grid, png
from flame_train.errors import ConfigError
from flame_train.show.library import Library
from flame_train.show.serve import Guard, listening


def ask(port, path, host=None, method="GET", headers=None):
    """(status, headers, body) of a request that is sent as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": host or f"127.0.0.1:{port}", **(headers or {})}.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


@pytest.fixture
def port(made, serve):
    return serve(made().folder)


# ---- who may ask -------------------------------------------------------------------------------------------


def test_it_listens_on_the_loopback_address_alone():
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="--port"):
            listening(listener.getsockname()[1])


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""]
)
def test_a_request_for_another_host_is_refused(port, host):
    for path in ("/run?name=run", "/run.json?name=run", "/assets/page.js", "/nothing"):
        status, _, body = ask(port, path, host=host.format(port=port) or " ")
        assert status in (400, 421)
        assert b"run" not in body


def test_a_request_without_a_host_or_with_two_is_refused(port):
    for hosts in (b"", f"Host: 127.0.0.1:{port}\r\nHost: evil.example\r\n".encode()):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"GET /run?name=run HTTP/1.1\r\n" + hosts + b"Connection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.split()[1] in (b"400", b"421")


def test_localhost_is_this_machine_too(port):
    assert ask(port, "/run?name=run", host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(port, method):
    assert ask(port, "/run?name=run", method=method)[0] == 405


def test_no_other_site_may_read_or_frame_an_answer_and_no_script_but_ours_runs(port):
    for path in ("/run?name=run", "/run.json?name=run", "/assets/page.css", "/sheet?name=run"):
        status, headers, _ = ask(port, path, headers={"Origin": "http://evil.example"})
        assert status == 200
        assert "access-control-allow-origin" not in headers
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy


TOKEN = "aToken-of_64bits"
VARIABLE = "FLAME_TRAIN_TOKEN"
PAGES = ("/", "/run?name=run", "/run.json?name=run", "/file?name=run&path=log.jsonl", "/assets/page.js", "/nothing")


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])
def guarded(made, serve, request):
    """The port of a server that needs a token."""
    return serve(made().folder, host=request.param, token=TOKEN)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("shown", [None, "", "x", TOKEN[:-1], TOKEN + "x", "é"])
def test_without_the_token_nothing_is_told(guarded, path, shown):
    cookies = {} if shown is None else {"Cookie": f"flame-train-{guarded}={shown}; token={TOKEN}"}
    asked = path if shown is None else f"{path}{'&' if '?' in path else '?'}token={quote(shown)}"
    status, headers, body = ask(guarded, asked, headers=cookies)
    assert status == 403
    assert "set-cookie" not in headers
    assert body == b"this page needs a token: open the whole address that flame-train printed\n"


@pytest.mark.parametrize("path", PAGES[1:4])
def test_the_address_with_the_token_leads_to_the_page_without_it(guarded, path):
    status, headers, body = ask(guarded, f"{path}&token={TOKEN}")
    assert (status, unquote(headers["location"])) == (303, unquote(path))
    assert TOKEN not in body.decode() + headers["location"]
    cookie, *rest = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} == set(rest)
    status, headers, _ = ask(guarded, path, headers={"Cookie": f"other=1; {cookie}"})
    assert status == 200
    assert "set-cookie" not in headers


def test_the_address_with_the_token_leads_to_no_other_host(guarded):
    for path in ("//evil.example", "///evil.example/x", "/\\evil.example"):
        _, headers, _ = ask(guarded, f"{path}?token={TOKEN}")
        place = headers.get("location", "/").replace("\\", "/")  # as browsers read it
        assert urlsplit(urljoin(f"http://127.0.0.1:{guarded}/", place)).port == guarded


def test_other_machines_ask_by_any_name_and_with_the_token(made, serve):
    port = serve(made().folder, host="0.0.0.0", token=TOKEN)
    cookie = {"Cookie": f"flame-train-{port}={TOKEN}"}
    assert ask(port, "/run?name=run", host="pod.example", headers=cookie)[0] == 200
    assert ask(port, "/run?name=run", host="pod.example")[0] == 403
    assert ask(port, "/run?name=run", host="pod.example", headers=cookie, method="POST")[0] == 405


def test_no_server_that_others_reach_is_without_a_token():
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ValueError, match=f"expected a token for {host}, which other machines reach"):
            Guard(None, 80, host)


@pytest.mark.parametrize("host", ["localhost", "evil.example", "", "1.2.3", "192.0.2.1"])
def test_an_address_that_is_none_of_this_machine_is_refused(made, capsys, host):
    assert cli.run(["show", str(made().folder), "--no-browser", "--host", host]) == 2
    assert "--host" in capsys.readouterr().err


# ---- which files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("../secret.txt", "..", "/etc/passwd", "samples/../../secret.txt", "checkpoints/../../secret.txt", "samples"),
        *("%2e%2e/secret.txt", "..\\secret.txt", ".lock", "", ".", "checkpoints/step-000040", "samples/../log.jsonl"),
        *("link.txt", "linked/secret.txt", "log.jsonl\0", "checkpoints/step-000040/lora.safetensors"),
    ],
)
def test_no_file_but_those_that_the_page_lists_is_given(made, serve, tmp_path, path):
    folder = made().folder
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", folder / "link.txt")
    os.symlink(tmp_path, folder / "linked")
    port = serve(folder)
    for query in (urlencode({"name": "run", "path": path}), f"name=run&path={quote(path, safe='/%')}"):
        status, _, body = ask(port, f"/file?{query}")
        assert (status, b"secret" in body) == (404, False)


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/assets/../guard.py", "/assets/..%2fguard.py", "/assets/guard.py", "/run/../../x"]
)
def test_no_path_leads_out_of_the_assets(port, path):
    assert ask(port, path)[0] == 404


@pytest.mark.parametrize("name", ["", "..", "../run", "/", "nothing", "run/"])
def test_a_run_is_looked_up_by_its_exact_name(port, name):
    for page in ("/run", "/run.json", "/dataset", "/sheet", "/compare"):
        assert ask(port, f"{page}?{urlencode({'name': name})}")[0] == 404


def test_a_listed_file_is_given_whole_to_be_saved(made, serve):
    folder = made().folder
    port = serve(folder)
    for path in ("log.jsonl", "samples/step-000010.png", "lora.safetensors"):
        status, headers, body = ask(port, f"/file?name=run&path={path}")
        assert status == 200
        assert body == (folder / path).read_bytes()
        assert headers["content-disposition"].startswith("attachment;")
        assert headers["content-type"] == "application/octet-stream"


def test_a_sample_or_sheet_that_became_a_link_is_not_given(made, serve, tmp_path):
    run = made()
    secret = tmp_path / "secret.png"
    secret.write_bytes(run.grid(10))
    (run.folder / "dataset.jpg").rename(tmp_path / "secret.jpg")
    os.symlink(tmp_path / "secret.jpg", run.folder / "dataset.jpg")
    place = run.folder / "samples" / "step-000010.png"
    place.unlink()
    os.symlink(secret, place)
    port = serve(run.folder)
    assert ask(port, "/sample?name=run&grid=step-000010.png&prompt=0")[0] == 404
    assert ask(port, "/sheet?name=run")[0] == 404
    assert ask(port, "/sample?name=run&grid=step-000020.png&prompt=0")[0] == 200


def images_of(section):
    """The attributes of each image in some HTML, as a browser reads them."""
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append(dict(attributes)) if tag == "img" else None
    parser.feed(section)
    return found


def test_the_control_images_of_a_prompt_stand_above_its_samples(made, serve):
    folder = made().folder
    text = (folder / "config.toml").read_text()
    head, _, sample = text.partition("[sample]\n")
    prompts = json.loads(next(line for line in sample.splitlines() if line.startswith("prompts = "))[10:])
    told = ", ".join(f'{{text = {json.dumps(prompt)}, control = ["x"]}}' for prompt in prompts[:2])
    sample = re.sub(r"(?m)^prompts = .*$", lambda _: f"prompts = [{told}, {json.dumps(prompts[2])}]", sample)
    (folder / "config.toml").write_text(f"{head}[sample]\n{sample}")
    red, blue = (np.full((40, 60, 3), pixel, np.uint8) for pixel in ((250, 0, 0), (0, 0, 250)))
    (folder / "controls.png").write_bytes(png(grid([red, blue, np.full((1, 1, 3), 255, np.uint8)])))
    port = serve(folder)
    section = json.loads(ask(port, "/run.json?name=run")[2])["sections"]["samples"]
    assert '<th scope="row">control</th>' in section
    found = [image for image in images_of(section) if image["src"].startswith("/control?")]
    assert [image["alt"] for image in found] == [f"control: {prompt}" for prompt in prompts[:2]]
    for image, pixel in zip(found, ((250, 0, 0), (0, 0, 250)), strict=True):
        status, _, raw = ask(port, image["src"])
        assert status == 200
        with Image.open(io.BytesIO(raw)) as shown:
            assert shown.size == (60, 40)
            assert np.abs(np.asarray(shown).mean((0, 1)) - pixel).max() < 4
    for query in ("prompt=3", "prompt=-1", "prompt=x", ""):
        assert ask(port, f"/control?name=run&{query}")[0] == 404


def test_a_run_without_control_images_has_none(port):
    assert ask(port, "/control?name=run&prompt=0")[0] == 404
    assert "control" not in json.loads(ask(port, "/run.json?name=run")[2])["sections"]["samples"]


def test_numbers_that_make_no_sense_are_not_there(port):
    for query in ("step-000010.png&prompt=3", "step-000010.png&prompt=-1", "x&prompt=0", "../log.jsonl&prompt=0", "²"):
        query = f"grid={query}"
        assert ask(port, f"/sample?name=run&{quote(query, safe='=&')}")[0] == 404
    assert ask(port, "/dataset?name=run&page=999&find=" + "x" * 9000)[0] == 200


# ---- what is answered --------------------------------------------------------------------------------------


def test_what_is_as_it_was_is_not_sent_again(made, serve):
    run = made()
    port = serve(run.folder)
    first = json.loads(ask(port, "/run.json?name=run")[2])
    assert json.loads(ask(port, f"/run.json?name=run&have={first['digest']}")[2]) == {"same": True, "running": False}
    run.append(41)
    again = json.loads(ask(port, f"/run.json?name=run&have={first['digest']}")[2])
    assert "41 of 80" in again["sections"]["status"]


def test_the_dataset_is_found_by_caption_and_comes_page_by_page(port):
    def of(query):
        return json.loads(ask(port, f"/dataset?name=run&{query}")[2])

    assert (of("")["found"], of("")["pages"]) == (212, 11)
    assert of("find=IMAGE+20")["found"] == 11
    assert of("find=a.mask.png")["found"] == 1
    assert of("page=10")["html"].count("<tr>") == 13
    assert "a.png" in of("order=highest")["html"]
    assert "a.png" not in of("order=lowest")["html"]


def test_runs_of_a_folder_are_listed_by_names_that_tell_them_apart(made, tmp_path):
    for name in ("one/run", "two/run", "three"):
        made(name)
    os.symlink(tmp_path / "one", tmp_path / "link")
    assert set(Library([tmp_path]).readers()) == {"one/run", f"{tmp_path.name}/three", "two/run"}


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_a_folder_without_a_run_is_a_wrong_command_line(tmp_path, capsys, what):
    (tmp_path / "empty").mkdir()
    assert cli.run(["show", str(tmp_path / what), "--no-browser"]) == 2
    assert "expected the folder of a run, or one with runs in it" in capsys.readouterr().err


def test_without_the_extra_the_command_says_how_to_install_it(made, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.run(["show", str(made().folder), "--no-browser"]) == 4
    assert "pip install 'flame-train[show]'" in capsys.readouterr().err


def test_a_token_of_the_environment_is_asked_for_and_not_written(made):
    command = [sys.executable, "-m", "flame_train", "show", str(made().folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {VARIABLE: TOKEN}) as process:
        line = process.stdout.readline()
        assert TOKEN not in line
        port = urlsplit(line.split()[0]).port
        assert ask(port, "/")[0] == 403
        assert ask(port, f"/?token={TOKEN}")[0] == 303
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.mark.parametrize("token", ["short", "with a blank and more", "a&b=c&d=e&f=g&h=i"])
def test_a_token_that_is_easy_to_guess_or_changes_in_an_address_is_refused(made, monkeypatch, capsys, token):
    monkeypatch.setenv(VARIABLE, token)
    assert cli.run(["show", str(made().folder), "--no-browser"]) == 2
    said = capsys.readouterr().err
    assert VARIABLE in said
    assert token not in said


@pytest.mark.parametrize("options", [[], ["--token"], ["--host", "0.0.0.0"]])
def test_the_command_serves_until_ctrl_c(made, options, forked):
    folder = made().folder
    command = [*forked, "-m", "flame_train", "show", str(folder), "--no-browser", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = urlsplit(process.stdout.readline().split()[0])
        assert ask(address.port, "/run.json?name=run")[0] == (403 if options else 200)
        _, headers, _ = ask(address.port, f"/?{address.query}")
        cookie = {"Cookie": headers.get("set-cookie", "")}
        assert ask(address.port, "/run.json?name=run", headers=cookie)[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_port_that_a_killed_server_had_is_free_at_once():
    with listening(0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listener.accept()[0].close()  # who closes first keeps the port for a minute
            assert client.recv(1) == b""
    listening(port).close()
