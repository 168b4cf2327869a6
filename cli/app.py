"""The program: its commands in groups, and help in plain text. A command loads the library when it runs."""

import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer
import typer.core

from edge_opt.cli import lists, models, phones

GROUPS = {
    "Models": (models.convert, models.inspect, models.explain, models.compare, models.shapes),
    "Phones": (phones.build, phones.evaluate, phones.profile, phones.tune),
    "In your CI": (),
    "What there is": (lists.demo, lists.passes, lists.targets),
}


def _write_sections(formatter: Any, rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Rows of help under the titles that go with them, in the order of these."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for title, row in rows:
        sections.setdefault(title, []).append(row)
    for title, listed in sections.items():
        with formatter.section(title):
            formatter.write_dl(listed)


class Program(typer.core.TyperGroup):
    """Lists the commands by what they are for, each with the first part of its help and without cutting it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        titles = [*GROUPS]
        commands: list[tuple[str, Any]] = [*self.commands.items()]
        commands.sort(key=lambda item: titles.index(item[1].rich_help_panel))
        heads = ((name, re.split(r"[:;]", command.help or "")[0].rstrip(".")) for name, command in commands)
        _write_sections(formatter, zip((c.rich_help_panel for _, c in commands), heads, strict=True))


class Command(typer.core.TyperCommand):
    """Lists its options in the groups that they name, which typer does with rich only."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each group."""
        titles = {"argument": "Arguments", "option": "Options"}
        _write_sections(
            formatter,
            (
                (getattr(parameter, "rich_help_panel", None) or titles[parameter.param_type_name], record)
                for parameter in self.get_params(ctx)
                if (record := parameter.get_help_record(ctx)) is not None
            ),
        )


app = typer.Typer(
    cls=Program,
    help="Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed.",
    epilog="Exit codes: 0 done; 1 a difference was found, or --require-all and a site was not converted; 2 usage; "
    "3 the model cannot be read; 4 nothing matched under --require-match; 5 the output could not be written.",
    # Plain text: help is often piped, and a panel of boxes takes longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(models.golden, name="golden", rich_help_panel="In your CI")
for group, functions in GROUPS.items():
    for function in functions:
        app.command(cls=Command, rich_help_panel=group)(function)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"edge-opt {version('edge-opt')}")
        raise typer.Exit


@app.callback()
def edge_opt(
    *,
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rewrites the attention of .tflite language models for edge NPUs, and proves that nothing changed."""
