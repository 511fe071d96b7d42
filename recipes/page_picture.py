"""The README's picture: the report page of `make demo-real`, as a headless Chromium draws it.

python -m recipes.page_picture chromium [PAGE] [PICTURE]

The first argument is the browser's command; Debian has it as `chromium` or `chromium-headless-shell`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recipes.real_model import FOLDER

PICTURE = Path(__file__).parent.parent / "docs" / "page.png"
SIZE = (800, 612)


def main() -> int:
    """Draw the page. Returns the browser's exit code."""
    browser, *paths = sys.argv[1:]
    page, picture = [*paths, *[str(FOLDER / "reviews.scores.run.html"), str(PICTURE)][len(paths) :]]
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-lcd-text", f"--window-size={SIZE[0]},{SIZE[1]}"]
    command = [browser, *options, f"--screenshot={Path(picture).resolve()}", Path(page).resolve().as_uri()]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - the browser that was named


if __name__ == "__main__":
    sys.exit(main())
