"""The pages have no more words than somebody reads, and public names say what they take."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import build_docs  # noqa: E402
import count_words  # noqa: E402


@pytest.mark.parametrize("readers", list(count_words.MOST_WORDS))
def test_pages_have_at_most_so_many_words(readers: str) -> None:
    words = sum(count_words.words_of(page)[0] for page in count_words.pages()[readers])
    assert words <= count_words.MOST_WORDS[readers]


def test_a_word_counts_for_whom_its_page_is() -> None:
    pages = count_words.pages()
    assert ROOT / "README.md" in pages["users"]
    assert ROOT / "dcp_placements" / "guides" / "production.md" in pages["users"]
    assert ROOT / "dcp_placements" / "load" / "DESIGN.md" in pages["developers"]
    assert ROOT / "dcp_placements" / "README.md" in pages["developers"]


def test_every_public_name_says_what_it_takes() -> None:
    assert list(build_docs.docstring_faults()) == []


def test_a_name_without_its_arguments_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(path: str, rename: object) -> None:
        """Return the shapes at ``path``."""

    def silent() -> None: ...

    names = [("shapes", shapes), ("silent", silent)]
    monkeypatch.setattr(build_docs, "public_objects", lambda: iter(names))
    assert list(build_docs.docstring_faults()) == [
        "shapes: its docstring does not say what rename is",
        "silent: has no docstring",
    ]


def test_units_and_errors_have_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(nbytes: int, timeout_s: float) -> None:
        """Read ``nbytes``.

        Args:
            nbytes: How much.
            timeout_s: How long, in seconds.
        """
        if nbytes < timeout_s:
            raise ValueError("too few")

    monkeypatch.setattr(build_docs, "public_objects", lambda: iter([("read", read)]))
    assert list(build_docs.docstring_faults()) == [
        "read: the line of nbytes lacks its unit",
        "read: its docstring does not say when it raises ValueError",
    ]


def test_links_of_a_page_lead_to_pages_of_the_site(tmp_path: Path) -> None:
    page = ROOT / "dcp_placements" / "guides" / "production.md"
    links = {
        "../storage/README.md#urls": "../storage/index.html#urls",
        "formats.md": "formats.html",
        "https://x.org": "https://x.org",
        "nothing.md": "nothing.md",
        "../load/state_at_birth.py": "../../files/dcp_placements/load/state_at_birth.py.txt",
    }
    for link, expected in links.items():
        assert build_docs.site_link(page, link, tmp_path) == expected
    assert (tmp_path / "files/dcp_placements/load/state_at_birth.py.txt").is_file()


def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    assert build_docs.build(tmp_path) == []
    first = (tmp_path / "index.html").read_text()
    assert "reference/dcp_placements.html#Placements" in first
    reference = (tmp_path / "reference" / "dcp_placements.html").read_text()
    assert 'id="CheckpointPlacement.__init__"' in reference
    assert re.search(r'href="dcp_placements/guides/tied-weights.html"', first)
    (tmp_path / "dcp_placements/guides/tied-weights.html").unlink()
    broken = list(build_docs.broken_links(tmp_path))
    assert any("tied-weights.html leads to no file" in line for line in broken)
