"""What pyproject.toml cannot say: the scripts beside the bundled models stay out of the wheel.

They make models with exporters that nobody installs to run edge-opt, and import each other as scripts.
"""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithoutScripts(build_py):
    """Of `edge_opt.testdata`, the package itself only."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package, as (package, module, file)."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in found if package != "edge_opt.testdata" or module[1] == "__init__"]


setup(cmdclass={"build_py": BuildWithoutScripts})
