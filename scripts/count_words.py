"""python scripts/count_words.py

Prints how many words each page has, for users and for developers. A word counts where somebody
reads it: blocks of code and what they print, which run as tests, stand in a column of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_WORDS = {"users": 15_000, "developers": 8_000}

FOR_DEVELOPERS = {"DESIGN.md", "CONTRIBUTING.md", "dcp_placements/README.md", "scripts/README.md"}
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def readers_of(page: str) -> str:
    """Return whom a page is for, by its path.

    >>> [readers_of(page) for page in ("README.md", "dcp_placements/load/DESIGN.md")]
    ['users', 'developers']
    """
    is_developers = page in FOR_DEVELOPERS or Path(page).name in FOR_DEVELOPERS - {"README.md"}
    return "developers" if is_developers else "users"


def words_of(page: Path) -> tuple[int, int]:
    """Return the words of a page outside its blocks, and in them."""
    text = page.read_text()
    outside = len(BLOCK.sub("", text).split())
    return outside, len(text.split()) - outside


def pages() -> dict[str, list[Path]]:
    """Return the pages by whom they are for; the list of changes is for both, and not counted."""
    found = [ROOT / "README.md", *ROOT.glob(".github/CONTRIBUTING.md")]
    found += [
        path
        for name in ("dcp_placements", "fakes", "scripts")
        for path in (ROOT / name).rglob("*.md")
    ]
    result: dict[str, list[Path]] = {readers: [] for readers in MOST_WORDS}
    for page in sorted(found):
        result[readers_of(page.relative_to(ROOT).as_posix())].append(page)
    return result


def main() -> None:
    for readers, of_readers in pages().items():
        counts = {page: words_of(page) for page in of_readers}
        for page, (outside, inside) in counts.items():
            print(f"{outside:7,} {inside:6,}  {page.relative_to(ROOT)}")
        outside, inside = (sum(column) for column in zip(*counts.values(), strict=True))
        print(f"{outside:7,} {inside:6,}  {readers}: at most {MOST_WORDS[readers]:,}; in blocks\n")


if __name__ == "__main__":
    main()
