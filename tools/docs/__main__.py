"""`python -m tools.docs` writes the generated documentation; with `--check` it only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.docs import index, module_pages
from tools.docs.headings import DOCS, all_pages
from tools.docs.sources import ROOT


def stale() -> dict[Path, str]:
    """The files that differ from what the code says, with the text that they should have."""
    found = {path: text for path, text in module_pages.written().items() if _differs(path, text)}
    if found:
        return found  # the index links to their headings
    pages = all_pages()
    rest = {DOCS / "index-a-z.md": index.index(pages), DOCS / "map.md": index.section_map(pages)}
    return {path: text for path, text in rest.items() if _differs(path, text)}


def _differs(path: Path, text: str) -> bool:
    return not path.is_file() or path.read_text(encoding="utf-8") != text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a file is stale")
    if parser.parse_args().check:
        found = stale()
        for path in found:
            print(f"{path.relative_to(ROOT)} is stale: run `make pages`")
        return 1 if found else 0
    for _ in range(2):
        for path, text in stale().items():
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
