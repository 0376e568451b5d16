"""Hooks of the mkdocs build: add studies, root pages and a page for every command, render formulas as MathML."""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.commands import command_list, command_pages
from specsim import __version__

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
STUDIES = tuple(sorted(path.parent.name for path in ROOT.glob("studies/*/report.md")))
PACKAGES = {"specsim": ROOT, "realrun": ROOT, "speckernels": ROOT / "kernels"}
TOY_DRAFTER = "tests/contract/test_toy_drafter.py"  # an example that a page offers
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
TABLE = re.compile(r'(?:<a id="__codeline[^\n]*<span class="go">[┏┃┡│└][^\n]*\n)+')  # in a highlighted output
log = logging.getLogger("mkdocs.hooks.specsim")  # a warning here ends a strict build


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The menu lists every study, the footer has the version; every public name has its docstring."""
    config.copyright = f"specsim {__version__}"
    reports = [{_title(ROOT / "studies" / name / "report.md"): f"studies/{name}/report.md"} for name in STUDIES]
    for entry in config.nav or []:
        if "Studies" in entry:
            entry["Studies"] = reports
    for package, home in PACKAGES.items():
        module: Any = griffe.load(package, search_paths=[home], resolve_aliases=True)
        for name in module.exports or ():
            docstring = getattr(module[name], "docstring", None)
            if docstring is None and not name.isupper():
                log.warning("%s.%s has no docstring", package, name)
    return config


def _title(page: Path) -> str:
    return page.read_text().splitlines()[0].removeprefix("# ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Reports and figures of the studies, and pages beside the README, stand where links from docs/ lead."""
    found = [path for name in STUDIES for path in (ROOT / "studies" / name).glob("figures/*.svg")]
    found += [ROOT / "studies" / name / file for name in STUDIES for file in ("report.md", "table.csv")]
    found += [ROOT / TOY_DRAFTER, *(path for name in ROOT_PAGES if (path := ROOT / name).is_file())]
    for path in found:
        place = path.relative_to(ROOT).as_posix()
        if path.name in ROOT_PAGES:
            content = path.read_text().replace("](docs/", "](")
            for name, page in ROOT_PAGES.items():
                content = content.replace(f"]({name}", f"]({page}")
            files.append(File.generated(config, ROOT_PAGES[place], content=content))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    for place, content in command_pages().items():
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shorten links that leave docs/ by a folder, as the site's layout needs; list every command's page."""
    markdown = markdown.replace("<!-- every command -->", command_list())
    markdown = re.sub(r"\]\(\.\./((?:\.\./)*)(studies/|tests/)", r"](\1\2", markdown)
    names = "|".join(map(re.escape, ROOT_PAGES))
    return re.sub(rf"\]\(\.\./((?:\.\./)*)({names})", lambda found: f"]({found[1]}{ROOT_PAGES[found[2]]}", markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas in MathML, which browsers show by themselves; tables of outputs scroll where other lines wrap."""
    return TABLE.sub(r'<span class="output-table">\g<0></span>', FORMULA.sub(_mathml, content))


def _mathml(found: re.Match[str]) -> str:
    return convert(html.unescape(found["tex"]), display="block" if found["tag"] == "div" else "inline")
