"""The README's picture: the report page of `make demo-real`, as a headless Chromium draws it.

python -m recipes.page_picture chromium

The argument is the browser's command; Debian has it as `chromium` or `chromium-headless-shell`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from recipes.real_model import FOLDER

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "page.png"
WINDOW = "800,612"


def main() -> int:
    """Draw the page. Returns the browser's exit code."""
    browser = sys.argv[1]
    look = ["--headless", "--no-sandbox", "--hide-scrollbars", "--disable-lcd-text", f"--window-size={WINDOW}"]
    page = (FOLDER / "reviews.scores.run.html").resolve().as_uri()
    command = [browser, *look, f"--screenshot={PICTURE}", page]
    return subprocess.run(command, check=False).returncode  # noqa: S603 - the browser that was named


if __name__ == "__main__":
    sys.exit(main())
