"""The commands that show what there is: demo, passes and targets."""

from pathlib import Path
from typing import Annotated

from edge_opt.cli import output
from edge_opt.cli.options import ForceOption, JsonOption, argument, complete_pass, complete_target


def demo(
    folder: Annotated[
        Path | None, argument("Keep the models there; a temporary folder by default.", "DIR")
    ] = None,
    *,
    overwrite: ForceOption = False,
) -> int:
    """Convert and compare a bundled tiny Gemma3; no download."""
    from edge_opt.cli.demo import run

    return run(folder, overwrite=overwrite)


def passes(
    name: Annotated[
        str | None, argument("Show this one's identity and demand.", "NAME", autocompletion=complete_pass)
    ] = None,
    *,
    as_json: JsonOption = False,
) -> int:
    """List the rewrites, in the order in which they run; or all about one."""
    from inspect import getdoc

    from edge_opt.output.errors import unknown
    from edge_opt.passes import PASSES

    if name is not None and name not in PASSES:
        raise unknown("pass", name, PASSES)
    chosen = list(PASSES.values()) if name is None else [PASSES[name]]
    records = [
        {
            "name": one.name,
            "demand": str(one.demand),
            "summary": one.summary,
            "identity": getdoc(type(one)),
            "sites": getdoc(type(one).sites),
        }
        for one in chosen
    ]

    def show() -> None:
        if name is None:
            rows = [("pass", "proved to be", "what it does")]
            rows += [(one.name, str(one.demand), one.summary) for one in chosen]
            output.say(*output.table(rows, left=3))
            return
        (one,) = records
        output.say(f"{one['name']} {one['summary']}.", "", *str(one["identity"]).splitlines(), "")
        output.say(f"Proved to be {one['demand']}.", "", f"Sites: {one['sites']}")

    output.answer({"passes": records}, show, as_json=as_json)
    return 0


def targets(
    name: Annotated[
        str | None,
        argument("Show this one's facts, as a target file has them.", "NAME", autocompletion=complete_target),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> int:
    """List the bundled targets; or every fact of one, with its source: a file to begin one of yours with."""
    from edge_opt.targets import load_target, target_names
    from edge_opt.targets.target import to_toml

    chosen = [load_target(one) for one in (target_names() if name is None else [name])]

    def show() -> None:
        rows = [("target", "form", "what it is")]
        rows += [(target.name, target.form, target.summary) for target in chosen]
        table = output.table(rows, left=3)
        output.say(*(table if name is None else to_toml(chosen[0]).splitlines()))

    output.answer({"targets": [target.to_dict() for target in chosen]}, show, as_json=as_json)
    return 0
