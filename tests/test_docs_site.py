"""The documentation site: what is generated is complete, nothing is loaded from the network, and it fits a phone."""

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import page_commands
import page_messages
import page_targets
import pytest
from browser import Browser, find_browser
from doc_pages import ROOT

import edge_opt
from edge_opt import EdgeOptError
from edge_opt.passes import PASSES
from edge_opt.targets import load_target, target_names

DOCS = ROOT / "docs"
WORKFLOWS = [
    ROOT / "examples" / "github-actions.yml",
    *sorted((ROOT / ".github" / "workflows").glob("*.yml")),
]
TROUBLES = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.+)`$", TROUBLES, re.MULTILINE)
# What a browser fetches by itself when it opens a page.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)[^>]*\s(?:src|data)=["']?(?:https?:)?//"""
    r"""|<link[^>]*\shref=["']?(?:https?:)?//|url\(["']?(?:https?:)?//|@import\s+["']?(?:https?:)?//"""
)


@pytest.mark.parametrize("heading", HEADINGS)
def test_every_message_in_troubleshooting_is_one_of_the_code(heading: str) -> None:
    assert any(text.startswith(heading) for text in page_messages.texts()), "no longer in the code"


def test_every_kind_of_error_has_a_heading_in_troubleshooting() -> None:
    known = page_messages.messages()
    said = {message.kind for message in known}
    explained = {
        message.kind for message in known for heading in HEADINGS if message.text.startswith(heading)
    }
    assert said - {"EdgeOptError"} <= explained, "kinds of errors that nothing is said of"


def test_kinds_of_errors_are_found_by_their_base() -> None:
    assert {"UsageError", "ShapeError", "RuntimeCrashed"} <= set(page_messages.error_classes())
    assert all(issubclass(kind, EdgeOptError) for kind in page_messages.error_classes().values())


def test_a_message_is_what_stands_in_the_source() -> None:
    exists = page_messages.Message(
        "UsageError", "… exists: pass --force to replace it, or give another output", "atomic"
    )
    assert exists in page_messages.messages()
    assert exists.text in page_messages.listed()


def test_every_command_and_option_is_on_the_page_of_commands() -> None:
    page = page_commands.sections()
    commands = dict(page_commands.commands())
    assert {"edge-opt convert", "edge-opt golden check"} <= set(commands)
    for name, command in commands.items():
        assert f"\n## {name}\n" in f"\n{page}"
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert all(re.search(rf"[` ]{option}[`, ]", page) for option in parameter.opts)


def test_every_fact_of_every_target_is_on_the_page_of_targets() -> None:
    page = page_targets.sections()
    unlinked = re.sub(r"\[(docs/[a-z-]+\.md)\]\([^)]*\)", r"\1", page)
    unlinked = re.sub(r"<(http[^>]+)>|\[[^]]*\]\((http[^)]+)\)", r"\1\2", unlinked)
    for name in target_names():
        target = load_target(name)
        assert f"### {name}\n" in page
        for fact, source in target.sources.items():
            assert f"| `{fact}` |" in page
            assert source in html.unescape(unlinked).replace("\\|", "|")


def test_every_fact_that_a_target_file_may_state_has_a_meaning() -> None:
    without = [name for name, _, meaning in page_targets.facts() if not meaning]
    assert without == []


def test_the_workflows_are_workflows() -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed (extra docs)")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    ran = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network, where the system lets us take it away."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed (extra docs)")
    folder = tmp_path_factory.mktemp("docs") / "site"
    apart = ["unshare", "--map-root-user", "--net"]
    possible = (
        shutil.which("unshare")
        and subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0
    )
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(
        [*(apart if possible else []), *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_has_a_page_with_its_pictures(name: str) -> None:
    page = (DOCS / "passes" / f"{name}.md").read_text(encoding="utf-8")
    assert "Proved to be" in page
    assert "Run before and after on both kernel sets" in page
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page):
        assert "</svg>" in (DOCS / "passes" / picture).read_text(encoding="utf-8")


def test_what_the_pages_say_of_the_code_is_what_the_code_says() -> None:
    pytest.importorskip("griffe", reason="pip install '.[docs]'")
    import write

    pages = sorted(page.relative_to(ROOT).as_posix() for page in write.stale(write=False))
    assert pages == [], write.STALE


def test_a_part_that_was_edited_by_hand_is_stale() -> None:
    pytest.importorskip("griffe", reason="pip install '.[docs]'")
    import write

    page = "<!-- edge-opt: version -->\n0.0.0\n<!-- edge-opt: end -->\n"
    assert write.written(page) == page.replace("0.0.0", edge_opt.__version__)
    timed = "<!-- edge-opt: output convert gemma.tflite -->\n"
    shown = write.written(f"{timed}<!-- edge-opt: end -->\n")
    assert write.written(re.sub(r"\d\.\d s", "9.9 s", shown)) == re.sub(r"\d\.\d s", "9.9 s", shown)


def test_the_pages_need_no_hook_of_the_site_to_be_read() -> None:
    """A code host shows them as they stand: attributes, tabs, admonitions and definition lists would be raw text."""
    for page in sorted(DOCS.rglob("*.md")):
        raw = re.search(
            r"^(:   |=== |!!! |\?\?\? |::: )|\]\([^)]*\)\{ ?[.#:]",
            page.read_text(encoding="utf-8"),
            re.MULTILINE,
        )
        assert raw is None, f"{page.name}: {raw and raw[0]}"


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    for path in DOCS.rglob("*.md"):
        page = path.relative_to(DOCS).with_suffix(".html").as_posix()
        assert f'href="{page}"' in front, page


@pytest.mark.slow
def test_no_page_names_anything_of_the_network_to_load(site: Path) -> None:
    for path in (path for path in site.rglob("*") if path.suffix in (".html", ".css")):
        found = FETCHED.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(site)}: {found}"


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium here")
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1300, False)], ids=["phone, dark", "desk, light"])
def test_a_browser_loads_files_of_the_site_only_and_every_page_fits(
    site: Path, width: int, dark: bool
) -> None:
    with Browser() as browser:
        for path in sorted(site.rglob("*.html")):
            if path.name == "404.html":
                continue  # its addresses are those of a server
            page = browser.look_at(path, width=width, dark=dark, picture=False)
            name = path.relative_to(site)
            beside = [url for url in page.requests if not url.startswith((site.as_uri(), "data:", "blob:"))]
            assert beside == [], name
            assert page.complaints == [], name
            assert max(page.width, page.scroll_width) <= width, name
            assert (sum(map(int, re.findall(r"\d+", page.ground)[:3])) < 200) is dark, name


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium here")
def test_a_page_that_a_user_reads_is_two_screens(site: Path) -> None:
    """Pages to look things up in, and section Project with its evidence, may be longer."""
    nav = (
        (ROOT / "mkdocs.yml")
        .read_text(encoding="utf-8")
        .partition("\nnav:\n")[2]
        .partition("- Reference:")[0]
    )
    pages = set(re.findall(r"- ([\w/-]+)\.md", nav)) - {"troubleshooting"}
    pages |= {f"passes/{name}" for name in PASSES}
    assert len(pages) > 30
    with Browser() as browser:
        screens = {page: browser.height(site / f"{page}.html", width=1440) / 900 for page in sorted(pages)}
    # A twentieth more, because fonts differ between machines.
    assert {page: f"{height:.2f}" for page, height in screens.items() if height > 2.1} == {}


@pytest.mark.slow
@pytest.mark.skipif(find_browser() is None, reason="no Chromium here")
def test_search_works_without_a_server(site: Path) -> None:
    with Browser() as browser:
        assert "matmul_convert" in browser.search(site / "passes" / "index.html", "saturation")
        assert "tile_rows" in browser.search(site / "passes" / "index.html", "--rows-per-tile")
