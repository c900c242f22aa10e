"""The text of a row program's kernel: how it loads operands, computes, and stores results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....dtype import DType
from ..nvrtc import begin, element_name
from .kernel_ir import Program
from .row_tiling import RowTiling

Names = tuple[tuple[str, DType], ...]
ROTATED = 8
"""Elements of a packet where rows are rotated, as in convrot.cuh."""
_BY_PRODUCTS = (64, 256)  # columns that are rotated together in convrot_products.cuh
_PRODUCTS = '#include "backend/cuda/codegen/convrot_products.cuh"\n'


@dataclass(frozen=True, slots=True)
class Signature:
    """What a kernel's text depends on besides program and tiling.

    The names and dtypes of rows, of tables with a `single` row, of `tables` with several, and of columns. The names of
    numbers. The outputs' dtypes, and the number of leading dims. `alike` names, for each of `tables`, the first one
    with the same run and count, whose row index it shares.
    """

    rows: Names
    single: Names
    tables: Names
    alike: tuple[str, ...]
    columns: Names
    numbers: tuple[str, ...]
    outputs: tuple[DType, ...]
    dims: int


class RowText:
    """Writes the kernel of a program."""

    def __init__(self, program: Program, signature: Signature, tiling: RowTiling, columns: int) -> None:
        self.program, self.tiling, self.signature = program, tiling, signature
        self.whole = tiling.elements == columns
        self.rows = {n: element_name(d) for n, d in signature.rows}
        self.tables = {n: element_name(d) for n, d in (*signature.single, *signature.tables)}
        self.outputs = [element_name(d) for d in signature.outputs]
        self.made = {f"out{i}": self.outputs[i] for i in range(len(program.rows))}
        self.vectors: list[str] = []
        self.totals = 0
        self.turned, self.late = False, _used_after_rotation(program) & self.rows.keys()
        self.fast = "float" not in [*self.rows.values(), *self.tables.values(), *self.made.values()]
        self.by_products = self.fast and program.rotates in _BY_PRODUCTS and tiling.threads % 32 == 0
        self.first = "taken(lane)" if self.by_products else "lane"

    def source(self) -> str:
        """The whole text. Where the row fills all packets of all threads, its length is a constant of the kernel."""
        steps = "".join(map(self._step, group_reductions(self.program.steps)))
        outputs = self._outputs()
        c, kinds = self.tiling, (step.split()[0] for step in self.program.steps)
        head = begin(self.fast) + (_PRODUCTS if self.by_products else header_of(kinds))
        arguments = ", ".join(self._arguments())
        return f"""{head}extern "C" __global__ void __launch_bounds__({c.block}) rows({arguments}) {{
  const unsigned row = blockIdx.x * {c.rows} + threadIdx.x / {c.threads};
  const int lane = threadIdx.x % {c.threads};
  const int length = {c.elements if self.whole else "columns"}, packets = length / {c.width};
  const bool live = row < count;
  const float n = length;
  __shared__ float shared[{max(1, self.totals)}][32];
{self._places()}{self._staged() if c.staged else ""}{self._loads()}{steps}{outputs}}}
"""

    # ---- where things are ----------------------------------------------------------------------------

    def _arguments(self) -> list[str]:
        s, found = self.signature, []
        for name, t in self.rows.items():
            found += [f"const {t}* __restrict__ p_{name}", *self._steps(name)]
        found += [f"const {t}* __restrict__ p_{name}" for name, t in self.tables.items()]
        for name in dict.fromkeys(s.alike):
            found += [*divisor_arguments(f"run_{name}"), *divisor_arguments(f"count_{name}")]
        found += [f"const {element_name(d)}* __restrict__ p_{name}" for name, d in s.columns]
        found += [f"const float {name}" for name in s.numbers]
        found += [f"{t}* __restrict__ out{i}" for i, t in enumerate(self.outputs)]
        found += [step for name in self.made for step in self._steps(name)]
        found += [a for d in range(1, s.dims) for a in divisor_arguments(f"size{d}")]
        return [*found, "const unsigned count", "const unsigned columns"]

    def _steps(self, name: str) -> list[str]:
        return [f"const long long step_{name}{d}" for d in range(self.signature.dims)]

    def _places(self) -> str:
        """Returns the row's index i<dim> along each leading dim, and a pointer r_<name> to its row of each table."""
        s, lines = self.signature, ["  unsigned outer = row;\n"]
        for d in range(s.dims - 1, 0, -1):
            lines += [f"  const unsigned i{d} = {divided(f'size{d}')}.rest(outer);\n"]
            lines += [f"  outer = {divided(f'size{d}')}.quotient(outer);\n"]
        lines += ["  const unsigned i0 = outer;\n"]
        for name in dict.fromkeys(s.alike):
            at = f"{divided(f'count_{name}')}.rest({divided(f'run_{name}')}.quotient(row))"
            lines += [f"  const long long at_{name} = {at} * (long long)length;\n"]
        places = {n: f" + at_{like}" for (n, _), like in zip(s.tables, s.alike, strict=True)}
        lines += [f"  const {t}* const r_{n} = p_{n}{places.get(n, '')};\n" for n, t in self.tables.items()]
        return "".join(lines)

    def _place(self, name: str) -> str:
        """Returns where an operand's or output's row begins."""
        return " + ".join(f"i{d} * step_{name}{d}" for d in range(self.signature.dims))

    def _tile(self, name: str) -> str:
        """Returns where a staged row begins."""
        return f"tile_{name} + threadIdx.x / {self.tiling.threads} * length"

    # ---- in ------------------------------------------------------------------------------------------

    def _staged(self) -> str:
        """Copies the block's rows into shared memory, in which there is room for the outputs' rows as well."""
        c, lines = self.tiling, []
        for name, t in (self.rows | self.made).items():
            packet, size = f"Packet<{t}, 16 / sizeof({t})>", f"{c.elements * c.rows} * sizeof({t}) / 16"
            lines += [f"  __shared__ {packet} packets_{name}[{size}];\n"]
            lines += [f"  {t}* const tile_{name} = packets_{name}[0].e;\n"]
        lines += [f"  const long long first = blockIdx.x * {c.rows}ll * length;\n"]
        lines += [f"  const unsigned held = min({c.rows}u, count - blockIdx.x * {c.rows}) * length;\n"]
        lines += [self._carried(t, f"tile_{name}", f"p_{name} + first") for name, t in self.rows.items()]
        return "".join([*lines, "  __syncthreads();\n"])

    def _carried(self, t: str, to: str, source: str) -> str:
        return f"  carry<{t}, {self.tiling.block}, {self.tiling.elements * self.tiling.rows}>({to}, {source}, held);\n"

    def _loads(self) -> str:
        w, k = self.tiling.width, self.tiling.packets
        held = "".join(f"  Packet<{t}, {w}> q_{name}[{k}];\n" for name, t in self.rows.items())
        places = {n: self._tile(n) if self.tiling.staged else f"p_{n} + {self._place(n)}" for n in self.rows}
        reads = {
            name: f"    q_{name}[k] = *reinterpret_cast<const Packet<{t}, {w}>*>({places[name]} + p * {w});\n"
            for name, t in self.rows.items()
        }
        loads = self._packets("".join(text for name, text in reads.items() if name not in self.late), self.first)
        if group := self.program.rotates:
            late = "".join(reads[name] for name in self.rows if name in self.late)
            turned = "turned_by_products" if self.by_products else "turned"
            held = f"  const int turned_lane = {turned}<{group}>(lane);\n{held}"
            loads += self._packets(late, "turned_lane") if late else ""
        columns = self.signature.columns
        own = "".join(f"  const float {name} = live ? to_float(p_{name}[row]) : 0.f;\n" for name, _ in columns)
        return held + loads + own

    # ---- computing -----------------------------------------------------------------------------------

    def _packets(self, body: str, lane: str = "") -> str:
        """Writes `body` for every packet of the row that this thread has."""
        first = lane or ("turned_lane" if self.turned else self.first)
        return f"""#pragma unroll
  for (int k = 0; k < {self.tiling.packets}; k++) {{
    const int p = {first} + k * {self.tiling.threads};
{self._left_out()}{body}  }}
"""

    def _left_out(self) -> str:
        """A line that skips packets which do not exist: those of a missing row, and a thread's last beyond the row.

        Missing rows are not skipped where rows are staged: they have a place in shared memory, which is not copied out.
        """
        missing = [] if self.tiling.staged or self.tiling.rows == 1 else ["!live"]
        missing += [] if self.whole else [f"k == {self.tiling.packets - 1} && p >= packets"]
        return f"    if ({' || '.join(missing)}) continue;\n" if missing else ""

    def _each(self, body: str, before: str = "", after: str = "") -> str:
        """Writes `body` for every element, with the operands it names at hand."""
        w, words = self.tiling.width, _words(body)
        tables = "".join(
            f"    const Packet<{t}, {w}> q_{name} = *reinterpret_cast<const Packet<{t}, {w}>*>(r_{name} + p * {w});\n"
            for name, t in self.tables.items()
            if name in words
        )
        names = [f"const float {n} = to_float(q_{n}[k].e[i]);" for n in self.rows if n in words]
        names += [f"const float {n} = to_float(q_{n}.e[i]);" for n in self.tables if n in words]
        names += [f"const float {n} = v_{n}[k][i];" for n in self.vectors if n in words]
        loop = f"#pragma unroll\n    for (int i = 0; i < {w}; i++) {{ {' '.join(names)} {body} }}\n"
        return self._packets(tables + before + loop + after)

    def _expression(self, text: str) -> str:
        text = re.sub(r"rotate_every_two\((\w+)\)", r"(i & 1 ? v_\1[k][i ^ 1] : -v_\1[k][i ^ 1])", text)
        half = self.tiling.packets // 2
        other = rf"v_\1[(k + {half}) % {2 * half}][i]"
        return re.sub(r"rotate_half\((\w+)\)", rf"(k < {half} ? -{other} : {other})", text)

    def _step(self, steps: Sequence[_Step]) -> str:
        what, name, text = steps[0]
        text = self._expression(text)
        if what == "let":
            return f"  const float {name} = {text};\n"
        if what == "row":
            body = self._each(f"v_{name}[k][i] = {text};")
            self.vectors.append(name)
            zeros = " = {}" if self.program.rotates else ""  # of packets beyond the row, whose threads rotate as well
            return f"  float v_{name}[{self.tiling.packets}][{self.tiling.width}]{zeros};\n{body}"
        if what.startswith("rotate"):
            return self._rotated(int(what.removeprefix("rotate")), name, text)
        return self._totals(what.capitalize(), steps)

    def _rotated(self, group: int, name: str, of: str) -> str:
        """Rotates a vector: all threads take part. The others are of packets that a thread no longer has."""
        if self.tiling.width != ROTATED:
            raise ValueError(f"a rotation of rows in packets of {self.tiling.width}, expected {ROTATED}")
        self.vectors, self.turned = [name], True
        way = f"rotate<{group}>"
        if self.by_products:  # a row of bf16 as it is needs no more than bf16 in the first product
            plain = [n for n, t in self.rows.items() if t == "bf16" and f"row {of} = {n}" in self.program.steps]
            way = f"rotate_by_products<{group}, {str(bool(plain)).lower()}>"
        return f"""  float (&v_{name})[{self.tiling.packets}][{ROTATED}] = v_{of};
#pragma unroll
  for (int k = 0; k < {self.tiling.packets}; k++) {way}(v_{name}[k]);
"""

    def _totals(self, how: str, steps: Sequence[_Step]) -> str:
        """Totals of one kind: each thread's own, then those of all threads, combined in one exchange."""
        place = self.totals
        self.totals += len(steps)
        own = [f"own{place}[{j}]" for j in range(len(steps))]
        body = " ".join(f"{o} = {how}::of({o}, {self._expression(s[2])});" for o, s in zip(own, steps, strict=True))
        found = ", ".join(f"{s[1]} = {o}" for o, s in zip(own, steps, strict=True))
        rows = f", {self.tiling.rows}" if self.tiling.threads > 32 and self.tiling.rows > 1 else ""
        return f"""  float own{place}[{len(steps)}] = {{{", ".join([f"{how}::none()"] * len(steps))}}};
{self._each(body)}  of_all<{how}, {self.tiling.threads}{rows}>(own{place}, shared + {place});
  const float {found};
"""

    # ---- out -----------------------------------------------------------------------------------------

    def _outputs(self) -> str:
        w, staged, parts = self.tiling.width, self.tiling.staged, []
        for text, (name, t) in zip(self.program.rows, self.made.items(), strict=True):
            place = self._tile(name) if staged else f"{name} + {self._place(name)}"
            store = f"    store<{t}, {w}>({place} + p * {w}, result);\n"
            parts.append(self._each(f"result[i] = {self._expression(text)};", f"    float result[{w}];\n", store))
        if staged:
            parts.append("  __syncthreads();\n")
            parts += [self._carried(t, f"{name} + first", f"tile_{name}") for name, t in self.made.items()]
        numbers = enumerate(self.program.numbers, len(self.made))
        if stores := " ".join(f"from_float({text}, out{i}[row]);" for i, text in numbers):
            parts.append(f"  if (live && lane == 0) {{ {stores} }}\n")
        return "".join(parts)


def divisor_arguments(name: str) -> list[str]:
    """Returns the declarations of the arguments by which a kernel divides by a number, see `rows.divisor`."""
    return [f"const unsigned by_{name}", f"const unsigned magic_{name}", f"const unsigned shift_{name}"]


def divided(name: str) -> str:
    """Returns the `Divisor` made of those arguments."""
    return f"Divisor{{by_{name}, magic_{name}, shift_{name}}}"


_Step = tuple[str, str, str]
"""A step's kind ("sum", "let", "row", ...), the name it defines, and its expression."""


def header_of(kinds: Iterable[str]) -> str:
    """Returns the lines that bring what steps of these kinds need and dtypes.cuh does not have."""
    headers = {"prod": "product", "rotate": "convrot"}
    wanted = sorted({headers[kind.rstrip("0123456789")] for kind in kinds if kind.rstrip("0123456789") in headers})
    return "".join(f'#include "backend/cuda/codegen/{name}.cuh"\n' for name in wanted)


def _used_after_rotation(program: Program) -> set[str]:
    """Returns the names in steps and outputs that come after a rotation."""
    places = [i for i, step in enumerate(program.steps) if step.startswith("rotate")]
    return _words(" ".join([*program.steps[places[0] + 1 :], *program.rows])) if places else set()


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def group_reductions(steps: Sequence[str]) -> list[list[_Step]]:
    """Returns the steps in groups: consecutive totals of one kind, none of which uses another, share one exchange."""
    groups: list[list[_Step]] = []
    for step in steps:
        head, text = step.split(" = ", 1)
        what, name = head.split()
        last = groups[-1] if groups and what in ("sum", "max", "min", "prod") else []
        if last and last[0][0] == what and not _words(text) & {s[1] for s in last}:
            last.append((what, name, text))
        else:
            groups.append([(what, name, text)])
    return groups
