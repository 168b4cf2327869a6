"""How work that takes long says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps that are done, and the steps in all."""
