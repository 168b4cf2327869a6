"""What a shell offers for the value of an option; nothing of the library is loaded before it is asked for."""

from collections.abc import Callable, Iterable


def one_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one of these names."""
    names = tuple(known)
    return lambda incomplete: _starting(names, incomplete)


def targets(incomplete: str) -> list[str]:
    """Completes a bundled target's name; a target file by its path is left to the shell."""
    from edge_opt.targets import target_names  # noqa: PLC0415

    return _starting(target_names(), incomplete)


def passes(incomplete: str) -> list[str]:
    """Completes the last name of a list `a,b` of passes, without those that it has."""
    from edge_opt.passes import PASSES  # noqa: PLC0415

    given, comma, last = incomplete.rpartition(",")
    left = [name for name in PASSES if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in _starting(left, last)]


def _starting(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]
