"""How command lines are read: nothing that was said is dropped, and ~ is the user's home."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """A command that refuses an option given twice where one value is wanted: the parser would take the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts the values into `ctx.params`. Raises what the parser raises, for it to show."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in given:
            single = option.param_type_name == "option" and not option.multiple
            repeats_itself = getattr(option, "is_flag", False) and not option.secondary_opts
            if single and not repeats_itself and given.count(option) > 1:
                raise typer.BadParameter(f"{option.opts[0]} takes one value, and was given {given.count(option)}", ctx)
        rest: list[str] = super().parse_args(ctx, args)
        for name, value in ctx.params.items():
            if isinstance(value, Path):
                ctx.params[name] = Path(os.path.expanduser(value))
        return rest
