"""Links lead somewhere, and pages name only places that everybody can reach."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.pages import ROOT, anchors, links, name_of, pages, urls

PUBLIC_HOSTS = {
    "127.0.0.1",  # this machine
    "host",  # stands for one
    "arxiv.org",
    "docs.python.org",
    "html.spec.whatwg.org",
    "keepachangelog.com",
    "semver.org",
    "www.apache.org",
    "www.rfc-editor.org",
}
OTHER_PAGES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md")]


@pytest.mark.parametrize("page", [*pages(), *OTHER_PAGES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """A dead link is where a reader gives up."""
    text = page.read_text(encoding="utf-8")
    for target in links(text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{target} is not there"
        assert place.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{target} has no such heading"


@pytest.mark.parametrize("page", [*pages(), *OTHER_PAGES], ids=name_of)
def test_only_public_places_are_named(page: Path) -> None:
    """What only its author can reach helps nobody."""
    text = page.read_text(encoding="utf-8")
    hosts = {urlsplit(url).hostname for url in urls(text)}
    assert hosts <= PUBLIC_HOSTS
    assert not re.search(r"(?<![\w./-])/(?:work|home|root|Users)/", text)
    assert not re.search(r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b", text)


def test_every_page_is_reached_from_the_readme() -> None:
    """A page that no page leads to is read by nobody."""
    start = ROOT / "README.md"
    reached, frontier = {start}, [start]
    while frontier:
        page = frontier.pop()
        for target in links(page.read_text(encoding="utf-8")):
            place = (page.parent / target.partition("#")[0]).resolve()
            if place.suffix == ".md" and place.is_file() and place not in reached:
                reached.add(place)
                frontier.append(place)
    unreached = [name_of(page) for page in pages() if page.is_relative_to(ROOT / "docs") and page not in reached]
    assert not unreached
