"""What is installed: the command `doctor`, and `--version`."""

from edge_opt.cli import options, output


def doctor(*, as_json: options.JsonOption = False) -> int:
    """Show what is installed and what works with it."""
    from edge_opt.building.doctor import Diagnosis, diagnose

    def show(found: Diagnosis) -> None:
        packages = [(name, one or "not installed") for name, one in found.versions.items()]
        abilities = [(one.name, one.summary) for one in found.abilities]
        output.say(*output.table([*packages, *abilities], left=2))
        output.say(*(f"Warning: {warning}" for warning in found.warnings))
        if found.remedy:
            output.say(f"To mend the rest, in a checkout of edge-opt: {found.remedy}")

    output.answer(diagnose(), show, as_json=as_json)
    return 0


def print_version(*, as_json: bool) -> None:
    """Print the version; as JSON, with those of Python, the system and the packages that results depend on."""
    if as_json:
        from edge_opt.building.doctor import versions

        output.say_json(versions())
    else:
        from importlib.metadata import version

        output.say(f"edge-opt {version('edge-opt')}")
