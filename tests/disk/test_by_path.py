"""Whatever opens, makes, renames or removes a file by its path is listed here, with why it may.

A path is resolved at each use, and follows links. What lies in a run folder, a cache or a sweep's folder is found below
a held folder instead (`disk/open_folder.py`), by `disk/` alone.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import flame_train

ROOT = Path(flame_train.__file__).parent
OF_PATHS = set("mkdir unlink rmdir rename touch write_text write_bytes symlink_to hardlink_to chmod".split())
OF_OS = set("open replace rename remove mkdir makedirs unlink rmdir link symlink truncate mkfifo utime".split())
MODULES = {"os": OF_OS, "shutil": {"rmtree", "copy", "copy2", "copyfile", "copytree", "move"}, "tempfile": None}
HELD = {"folder", "held", "inside", "_held", "part", "place.folder", "top", "root", "_handle", "_run"}

ALLOWED = {
    # the user's own files, which are read: images, configs, models
    ("config/parse.py", "path.open"): "reads a config",
    ("data/cache.py", "os.open"): "reads an entry, which its checksum must fit",
    ("data/file_reading.py", "os.open"): "reads an image, a list of prompts",
    ("io/gguf.py", "open"): "reads a model",
    ("io/model_search.py", "file.open"): "reads another program's model",
    ("io/safetensors.py", "open"): "reads a model",
    ("models/sdxl/names_unet.py", "scheduler.open"): "reads a model",
    ("run/plan/ranks.py", "open"): "reads the beginning of what a config names",
    ("remote/fetch.py", "path.open"): "reads what was fetched, whose hash it takes",
    ("io/hub.py", "tempfile.TemporaryDirectory"): "a folder of a name that nobody can guess",
    ("io/hub.py", "path.parent.mkdir"): "in that folder",
    ("io/hub.py", "path.write_bytes"): "in that folder",
    # folders that the user names, which may be links
    ("data/cache.py", "self.folder.mkdir"): "the cache itself",
    ("io/commit.py", "root.mkdir"): "of a path that is no run folder: tests",
    # folders in which another program's library writes by paths; `io/run_files.py` refuses links in their place
    ("training/trackers.py", "folder.mkdir"): "TensorBoard's",
    ("training/trackers.py", "folder / 'wandb'.mkdir"): "W&B's",
    # no files of ours
    ("distributed/watch.py", "os.utime"): "a descriptor",
    ("distributed/local_memory.py", "os.open"): "memory of another process of the run, below /proc",
    ("distributed/local_memory.py", "_File.open"): "the same",
    ("data/clips.py", "av.open"): "a clip's bytes",
    ("data/clip_files.py", "av.open"): "a clip's bytes",
    ("cli.py", "os.open"): "/dev/null",
    ("commands/output.py", "os.open"): "/dev/null",
    ("commands/output.py", "open"): "/dev/null",
    ("commands/output.py", "tempfile.NamedTemporaryFile"): "a report of a bug, of a name that nobody can guess",
    ("engine/backend/host_memory.py", "Path(_CLEAR).write_text"): "a file of the kernel",
    # the user's cache folder
    ("run/memory/kept_prediction.py", "folder.mkdir"): "the folder of predictions",
    ("run/memory/kept_prediction.py", "os.utime"): "a prediction, whose file its checksum must fit",
    ("run/memory/kept_prediction.py", "file.unlink"): "the prediction unused for longest",
    ("ui/pictures.py", "remembered.mkdir"): "the folder of images that were decoded",
    # a config that was dropped onto the window
    ("ui/draft.py", "tempfile.TemporaryDirectory"): "a folder of a name that nobody can guess",
    ("ui/draft.py", "file.write_text"): "in that folder",
    # drawn for a training adapter
    ("tools/make_adapter.py", "place.with_suffix('.txt').write_text"): "the caption beside a drawn image",
    ("tools/make_adapter.py", "latents.unlink"): "latents that are in the cache now",
    ("tools/make_adapter.py", "folder / f'{i}.txt'.write_text"): "in a folder of a name that nobody can guess",
    # a store's, which has no links here
    ("remote/store.py", "self._fs.open"): "a file of a store",
    ("remote/store.py", "self._fs.rmdir"): "a folder of a store",
}


def calls(tree: ast.AST) -> Counter[str]:
    """The calls in a module by which something is opened, made, renamed or removed, as they are written."""
    found = Counter[str]()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open":
            found["open"] += 1
        elif isinstance(called, ast.Attribute):
            of, name = ast.unparse(called.value), called.attr
            if of in MODULES:
                known = MODULES[of]
                found[f"{of}.{name}"] += known is None or name in known
            elif name in OF_PATHS or (name == "open" and of not in NOT_FILES) or is_of_a_path(node, name):
                found[f"{of}.{name}"] += 1
    return +found


def is_of_a_path(call: ast.Call, name: str) -> bool:
    """Whether `x.replace(y)` is that of a path: a text's has two arguments."""
    return name == "replace" and len(call.args) == 1 and not call.keywords


NOT_FILES = {"Image", "OpenFolder", "webbrowser", "family", "super()", "bar"}
"""Whose `open` opens no path: decoders of bytes, a held folder, a browser, a model, a progress bar."""


def test_nothing_else_goes_by_paths():
    found = {
        (path.relative_to(ROOT).as_posix(), call)
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent != ROOT / "disk"
        for call in calls(ast.parse(path.read_text()))
    }
    of_held = {
        (file, call) for file, call in found if call.rpartition(".")[2] == "rename" and call.rpartition(".")[0] in HELD
    }
    assert found - of_held - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "what is gone needs no leave"
