"""What pyproject.toml cannot say: which files of testdata/ are installed, and the links on a package index.

Scripts beside the bundled models stay out of the wheel: they need exporters that nobody installs to run edge-opt, and
import each other as scripts. Links relative to the repository would be broken on a package index.
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithoutScripts(build_py):
    """Of `edge_opt.testdata`, the package itself only."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package, as (package, module, file)."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [
            module for module in found if package != "edge_opt.testdata" or module[1] == "__init__"
        ]


def long_description() -> str:
    """The README; its relative links lead to the repository in EDGE_OPT_REPO_URL, or without it become plain text."""
    text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    url = os.environ.get("EDGE_OPT_REPO_URL")
    relative = r"\[([^]]*)\]\((?!\w+:)([^)]+)\)"
    if url:
        text = re.sub(f"!{relative}", rf"![\1]({url}/raw/HEAD/\2)", text)
        return re.sub(relative, rf"[\1]({url}/blob/HEAD/\2)", text)
    return re.sub(relative, r"\1", re.sub(f"!{relative}\n\n", "", text))


def project_urls() -> dict[str, str]:
    """Links beside the description on a package index; none without the repository in EDGE_OPT_REPO_URL."""
    url = os.environ.get("EDGE_OPT_REPO_URL")
    if not url:
        return {}
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {"Repository": url, "Issues": f"{url}/issues"} | {
        name: f"{url}/blob/HEAD/{page}" for name, page in pages.items()
    }


setup(
    cmdclass={"build_py": BuildWithoutScripts},
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
)
