"""A public function with more than four parameters documents them, its result and its errors."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "flame_train"
FEW = 4
EVERYWHERE = frozenset({"Launcher", "Namespace", "Session"})
"""What kernels, references and stages take: the classes say what they are."""
_BLOCKS = "networks/block_network.py"
ONCE = {
    **dict.fromkeys(("x_BHWC", "times_B", "controls", "context_BTC", "rows_B"), _BLOCKS),
    **dict.fromkeys(
        ("img_BLD", "txt_BTD", "x_BLD", "x_BSD", "cos_S1E", "sin_S1E", "cos", "sin"), "networks/block_network.py"
    ),
    **dict.fromkeys(("seen_B", "mask"), _BLOCKS),
    **dict.fromkeys(("input", "layout", "eps", "op", "out", "lse", "g", "target", "targets"), "engine/functional.py"),
    **dict.fromkeys(("weight", "bias", "residual", "plus", "down", "up", "downs", "ups"), "engine/functional.py"),
    **dict.fromkeys(("scale", "scales", "interleaved"), "engine/functional.py"),
    **dict.fromkeys(("device", "dtype"), "engine/mode.py"),
    **dict.fromkeys(("source", "overrides"), "config/load.py"),
}
"""What travels everywhere, with the file whose docstrings describe it: nobody else need."""
NAMED_SO = frozenset(
    (
        *("adapter", "arena", "attached", "backend", "config", "denoiser", "encoded", "family"),
        *("folder", "force", "model", "name", "opening", "optimizer", "part", "path", "plan"),
        *("processes", "request", "rule", "seed", "state", "step", "stop", "vae", "view"),
    )
)
"""What its name and its type describe; a docstring has one of these where it means more."""
HELP = frozenset({f"commands/{name}.py" for name in ("bench", "captions", "lora_tools", "pages", "train")} | {"cli.py"})
"""The docstring of a command is its `--help`, where each option has a line already."""


class Method(NamedTuple):
    """A public function of a module or a class, with the names of that class's bases and the class's docstring."""

    node: ast.FunctionDef
    bases: tuple[str, ...] = ()
    of_class: str | None = None

    @property
    def docstring(self) -> str | None:
        """The function's own; a constructor without one has its class's."""
        return ast.get_docstring(self.node) or (self.of_class if self.node.name == "__init__" else None)

    @property
    def parameters(self) -> list[str]:
        a = self.node.args
        given = [p for p in (*a.posonlyargs, *a.args, *a.kwonlyargs) if p.arg not in ("self", "cls")]
        given = [p for p in given if p.annotation is None or ast.unparse(p.annotation) not in EVERYWHERE]
        return [p.arg for p in given if p.arg not in ONCE and p.arg not in NAMED_SO]

    @property
    def has_result(self) -> bool:
        r = self.node.returns
        return r is not None and not (isinstance(r, ast.Constant) and r.value is None)

    @property
    def raises(self) -> bool:
        inner = {
            id(x)
            for f in ast.walk(self.node)
            if isinstance(f, ast.FunctionDef | ast.Lambda) and f is not self.node
            for x in ast.walk(f)
        }
        return any(isinstance(x, ast.Raise) and x.exc and id(x) not in inner for x in ast.walk(self.node))


def bases_of(node: ast.ClassDef) -> tuple[str, ...]:
    """The names of a class's bases, without their modules and type arguments."""
    return tuple(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements in a node, without expressions: these are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers"):
        block = getattr(node, name, None)
        yield from block if isinstance(block, list) else ()


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Every class of a tree."""
    for node in statements(tree):
        if isinstance(node, ast.ClassDef):
            yield node
        yield from classes(node)


def ancestors(bases: tuple[str, ...], parents: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """The bases and theirs."""
    for base in bases:
        yield base
        yield from ancestors(tuple(b for b in parents.get(base, ()) if b != base), parents)


def methods(tree: ast.AST, bases: tuple[str, ...] = (), of_class: str | None = None) -> Iterator[Method]:
    """Every public function of a tree: neither its name nor one around it begins with an underscore."""
    for node in statements(tree):
        name = getattr(node, "name", "")
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and name.startswith("_") and name != "__init__":
            continue
        if isinstance(node, ast.FunctionDef):
            yield Method(node, bases, of_class)
        if isinstance(node, ast.ClassDef):
            yield from methods(node, bases_of(node), ast.get_docstring(node))
        else:
            yield from methods(node)


def sections(docstring: str) -> dict[str, str]:
    """The parts of a docstring under `Args:`, `Returns:` and `Raises:`."""
    parts = re.split(r"^(Args|Returns|Raises):", docstring, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def missing(method: Method, docstring: str) -> list[str]:
    """What a docstring lacks."""
    told = sections(docstring)
    lacking = [name for name in method.parameters if not re.search(rf"\b{name}\b", told.get("Args", ""))]
    is_told = "Returns" in told or re.search(r"\b[Rr]eturns |^Says ", docstring.partition("\n")[0])
    lacking += ["Returns"] if method.has_result and not is_told else []
    lacking += ["Raises"] if method.raises and "Raises" not in told else []
    return lacking


def undocumented(package: Path) -> dict[str, list[str]]:
    """By file, each public function with more parameters than `FEW` that lacks something.

    A method without a docstring has that of the same method in a base class.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    documented: dict[str, set[str]] = defaultdict(set)
    for tree in trees.values():
        for node in classes(tree):
            own = [f for f in node.body if isinstance(f, ast.FunctionDef)]
            documented[node.name].update(f.name for f in own if ast.get_docstring(f))
    parents = {node.name: bases_of(node) for tree in trees.values() for node in classes(tree)}
    found = defaultdict(list)
    for path, tree in trees.items():
        for method in methods(tree):
            docstring, name = method.docstring, method.node.name
            inherited = any(name in documented[base] for base in ancestors(method.bases, parents))
            if (
                len(method.parameters) <= FEW
                or path.relative_to(package).as_posix() in HELP
                or (not docstring and inherited)
            ):
                continue
            if lacking := missing(method, docstring or ""):
                found[path.relative_to(package).as_posix()].append(f"{name}: {', '.join(lacking)}")
    return dict(found)


def test_long_signatures_are_documented() -> None:
    assert undocumented(PACKAGE) == {}


def test_what_is_described_once_is_described() -> None:
    for name, file in ONCE.items():
        assert re.search(rf"`{name}`", (PACKAGE / file).read_text(encoding="utf-8")), (name, file)


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    def f(self, a, b, c, d, e) -> int:\n"
        "        '''F.\n\n        Args:\n            a, b, c, d: numbers.\n        '''\n"
        "        raise ValueError(a)\n"
        "class B(A):\n"
        "    def f(self, a, b, c, d, e) -> int: ...\n"
        "def g(a, b, c, d, e) -> None: ...\n"
        "def _h(a, b, c, d, e) -> None:\n"
        "    def inner(a, b, c, d, e) -> None: ...\n"
        "class _C:\n"
        "    def f(self, a, b, c, d, e) -> None: ...\n"
    )
    assert undocumented(tmp_path) == {"a.py": ["f: e, Returns, Raises", "g: a, b, c, d, e"]}
