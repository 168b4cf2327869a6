"""Versions of installed packages, by the modules that they provide: a nightly build has another name than a release."""

import logging
from collections.abc import Iterable
from functools import cache
from importlib import metadata

from edge_opt.base.errors import UsageError

LOG = logging.getLogger("edge_opt")
"""The logger of all modules, for users of the library."""
RUNTIME = "ai_edge_litert"
"""The module of the LiteRT runtime."""


@cache
def _providers() -> dict[str, list[str]]:
    return {
        module: sorted(set(names)) for module, names in metadata.packages_distributions().items()
    }


def version_of(module: str) -> str | None:
    """The version of the package that provides a module, None if there is none; those of all, if there are several."""
    names = _providers().get(module)
    return " and ".join(map(metadata.version, names)) if names else None


def usual_name(module: str) -> str:
    """The name of the package whose releases provide a module."""
    return module.replace("_", "-")


def versions_of(modules: Iterable[str], remedy: str) -> dict[str, str]:
    """The version that provides each module, by the package's usual name; UsageError with `remedy` if there is none."""
    versions: dict[str, str] = {}
    for module in modules:
        found = version_of(module)
        if found is None:
            raise UsageError(f"{usual_name(module)} is not installed: {remedy}")
        versions[usual_name(module)] = found
    return versions


@cache
def warn_if_overwritten() -> None:
    """Log a warning, once, if the files of the LiteRT runtime are a mixture; see `overwritten`."""
    sentence = overwritten()
    if sentence:
        LOG.warning("edge-opt: warning: %s", sentence)


def overwritten() -> str:
    """What to do if a release of the LiteRT runtime and a nightly build overwrote each other's files; else empty.

    pip does so, because a package that requires one is not content with the other.
    """
    names = [usual_name(RUNTIME), f"{usual_name(RUNTIME)}-nightly"]
    found = [one for name in names for one in metadata.Distribution.discover(name=name)]
    if len(found) < len(names):
        return ""
    versions = " and ".join(f"{one.name} {one.version}" for one in found)
    return (
        f"{versions} are both installed and share their files: run `pip uninstall -y {names[0]} {names[1]}`, then `pip "
        f"install --no-deps` with the one that you want"
    )
