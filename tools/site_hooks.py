"""Hooks of MkDocs (mkdocs.yml): the navigation from docs/index.md, reference pages from the code,
links that leave docs/.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import reference  # noqa: E402  (a file of this folder)

REFERENCE = "Reference"
AFTER = "Guides"
"""The group that the generated pages are in, and the group of docs/index.md that it follows."""

PROJECT = {
    "Contributing": "CONTRIBUTING.md",
    "Changelog": "CHANGELOG.md",
    "Security": "SECURITY.md",
}
"""Pages of the root, which are the last group."""

MAIN = (
    "checkpoints",
    "clicks",
    "configure",
    "faults",
    "models",
    "predict",
    "prepare",
    "tune",
    "validate",
)
"""Pages that the search prefers."""

LISTS = ("reference/", "benchmarks", "changelog", "five-systems")
"""Beginnings of pages that mention everything, which the search shows after others."""

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")

PICTURE = re.compile(
    r'<picture><source [^>]* srcset="([^"]+)"><img alt="([^"]+)" src="([^"]+)"></picture>'
)
"""A picture with a dark version, as GitHub shows it. The site's own switch of dark and light needs
two images.
"""


def groups(index: str) -> dict[str, list[tuple[str, str]]]:
    """Return title and path of the pages in each group of docs/index.md: the links in the first
    table column.
    """
    by_heading: dict[str, list[tuple[str, str]]] = {}
    heading = ""
    for line in index.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ").strip()
        elif line.startswith("| [") and (link := LINK.search(line)):
            by_heading.setdefault(heading, []).append((link[1][0].upper() + link[1][1:], link[2]))
    return by_heading


def web_address(remote: str) -> str | None:
    """Return the web page of a Git remote without user and password, or None for a remote that is
    not on a web host.
    """
    address = re.fullmatch(
        r"(?:https?://|ssh://)?(?:[^@/]+@)?([\w.-]+\.[a-z]+)(?::\d+)?[:/](.+?)(?:\.git)?/?", remote
    )
    return f"https://{address[1]}/{address[2]}" if address else None


def on_config(config: Any) -> Any:
    """List all pages: pages of docs/index.md by group, and generated pages. Link to the repository,
    the checkout's origin, at the end of each page (`repo_url` would load its figures from
    there).
    """
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    has_git = shutil.which("git") is not None
    remote = (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if has_git
        else ""
    )
    if url := web_address(remote):
        config.extra["repository"] = url
        config.extra["social"] = [
            {"icon": "fontawesome/brands/git-alt", "link": url, "name": "Repository"}
        ]
    nav: list[dict[str, Any]] = [{"Home": "index.md"}]
    for group, pages in groups((ROOT / "docs" / "index.md").read_text()).items():
        nav.append({group: [{title: path} for title, path in pages]})
        if group == AFTER:
            nav.append(
                {
                    REFERENCE: [
                        {title: f"reference/{name}.md"}
                        for name, (title, _) in reference.PAGES.items()
                    ]
                }
            )
    nav.append({"Project": [{title: name.lower()} for title, name in PROJECT.items()]})
    config.nav = nav
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages and the pages in the root folder."""
    for name in reference.PAGES:
        page = File.generated(config, f"reference/{name}.md", content=reference.page(name))
        page.edit_uri = None
        files.append(page)
    for name in PROJECT.values():
        files.append(
            File.generated(config, name.lower(), content=from_the_root((ROOT / name).read_text()))
        )
    return files


def from_the_root(text: str) -> str:
    """Return a page of the root as a page of docs/, with corrected links."""

    def moved(link: re.Match[str]) -> str:
        words = link[1]
        target = link[2]
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        if target in PROJECT.values():
            return f"[{words}]({target.lower()})"
        return (
            f"[{words}]({target.removeprefix('docs/')})"
            if target.startswith("docs/")
            else f"[{words}](../{target})"
        )

    return LINK.sub(moved, text)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links to files outside of docs/ into links to the repository, if it is known; else only
    their text stays. Pictures follow the site's switch of dark and light. Sets the page's boost in
    the search, as front matter, which GitHub would show, does.
    """
    name = page.file.src_uri.removesuffix(".md")
    page.meta["search"] = {"boost": 2 if name in MAIN else 0.5 if name.startswith(LISTS) else 1}
    markdown = PICTURE.sub(r"![\2](\3#only-light)![\2](\1#only-dark)", markdown)
    depth = page.file.src_uri.count("/") + 1

    def outside(link: re.Match[str]) -> str:
        text = link[1]
        target = link[2]
        if not target.startswith("../" * depth):
            return link[0]
        path = target.removeprefix("../" * depth)
        return (
            f"[{text}]({config.extra['repository']}/blob/main/{path})"
            if "repository" in config.extra
            else text
        )

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(outside, part) for part in parts)
