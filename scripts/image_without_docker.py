"""Runs the lines of the Dockerfile in a plain root folder, where no container engine is at hand.

    debootstrap --variant=minbase --components=main,universe noble ROOT
    python scripts/image_without_docker.py ROOT WORK [--bind /opt/packages ...] [--arg ARCHITECTURES=90 ...]

Needs root and overlayfs. ROOT stands for the image that the Dockerfile starts from, and stays as it is: each stage
writes into WORK/STAGE. Paths after --bind are seen inside, and cannot be changed there. At the end it runs the entry
point, as the image's user, and trains the quickstart.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SOURCE = Path(__file__).parents[1]
TRIED = (("--version",), ("doctor", "--device", "cpu"), ("quickstart", "/runs/first", "--device", "cpu"))


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields each instruction of a Dockerfile with its words, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, rest = line.strip().partition(" ")
            yield name.upper(), rest.strip()


class Stage:
    """A stage of the image: a folder over ROOT, and what the Dockerfile said of it until now."""

    def __init__(self, name: str, root: Path, work: Path, bound: Sequence[Path]) -> None:
        self.folder, self._bound = work / name / "root", bound
        self.environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.directory, self.user, self.entry = "/", "root", list[str]()
        upper, scratch = work / name / "upper", work / name / "scratch"
        for folder in (self.folder, upper, scratch):
            folder.mkdir(parents=True)
        layers = f"lowerdir={root},upperdir={upper},workdir={scratch}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, self.folder], check=True)
        for path in (Path("/proc"), Path("/dev"), Path("/etc/resolv.conf"), *bound):
            inside = self.folder / path.relative_to("/")
            if path.is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            subprocess.run(["mount", "--bind", path, inside], check=True)
            if path in bound:
                subprocess.run(["mount", "-o", "remount,bind,ro", inside], check=True)

    def run(self, command: Sequence[str]) -> None:
        """Runs a command inside. Raises CalledProcessError where it fails."""
        chosen = [f"--userspec={self.user}"] if self.user != "root" else []
        inside = ["chroot", *chosen, str(self.folder), "sh", "-c", 'cd "$0" && exec "$@"', self.directory, *command]
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        subprocess.run(inside, check=True, env=self.environment | {"HOME": home})

    def close(self) -> None:
        """Takes the mounts away."""
        subprocess.run(["umount", "--recursive", self.folder], check=True)


def copied(words: str, stage: Stage, stages: dict[str, Stage]) -> None:
    """Copies as COPY does: from another stage, or what .dockerignore leaves of the source."""
    *options, source, target = words.split()
    inside = stage.folder / target.lstrip("/")
    if options:
        taken = stages[options[0].removeprefix("--from=")].folder / source.lstrip("/")
        shutil.copytree(taken, inside, symlinks=True, dirs_exist_ok=True)
        return
    kept = [line[1:] for line in (SOURCE / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        if (SOURCE / name).is_dir():
            shutil.copytree(SOURCE / name, inside / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            inside.mkdir(parents=True, exist_ok=True)
            shutil.copy(SOURCE / name, inside / name)


def build(stages: dict[str, Stage], root: Path, work: Path, bound: Sequence[Path], given: dict[str, str]) -> None:
    """Does what each instruction says. Adds the stages by name; the last one is the image."""
    stage = None
    for name, words in instructions((SOURCE / "Dockerfile").read_text()):
        if name == "FROM":
            stage = Stage(words.partition(" AS ")[2] or "image", root, work, bound)
            stages[stage.folder.parent.name] = stage
        elif stage is None:
            continue  # the name of the image to start from, for which ROOT stands
        elif name == "RUN":
            print(f"RUN {words}", flush=True)
            stage.run(["sh", "-c", words])
        elif name in ("ENV", "ARG"):
            pairs = dict(word.split("=", 1) for word in shlex.split(words))
            pairs = {key: value.replace("$PATH", stage.environment["PATH"]) for key, value in pairs.items()}
            stage.environment |= pairs | {key: given[key] for key in pairs if key in given}
        elif name == "COPY":
            copied(words, stage, stages)
        elif name == "WORKDIR":
            stage.directory = words
        elif name == "USER":
            stage.user = words
        elif name == "ENTRYPOINT":
            stage.entry = [word.strip('[]" ') for word in words.split(",")]
        elif name not in ("VOLUME", "EXPOSE", "CMD"):
            raise SystemExit(f"Dockerfile: {name} is not known here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--bind", type=Path, nargs="*", default=[])
    parser.add_argument("--arg", nargs="*", default=[])
    args = parser.parse_args()
    if os.geteuid():
        sys.exit("chroot and mounts need root")
    given = dict(word.split("=", 1) for word in args.arg)
    stages = dict[str, Stage]()
    try:
        build(stages, args.root.resolve(), args.work.resolve(), args.bind, given)
        image = stages["image"]
        for tried in TRIED:
            print(*image.entry, *tried, flush=True)
            image.run([*image.entry, *tried])
    finally:
        for stage in stages.values():
            stage.close()


if __name__ == "__main__":
    main()
