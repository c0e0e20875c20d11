#!/usr/bin/env python3
"""Takes the picture of README.md, doc/report.png, of the page that `make demo`
wrote. Run it in the environment of setup/extras.sh, after a demo on a machine
with nothing else to do: what else runs shows in the picture."""
import io
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "runs" / "demo" / "report.html"


def main():
    from PIL import Image
    from playwright.sync_api import sync_playwright

    if not PAGE.exists():
        sys.exit(f"{PAGE} is missing: run \"make demo\" first")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium")
        )
        page = browser.new_page(
            viewport={"width": 1200, "height": 900}, color_scheme="light"
        )
        page.goto(PAGE.as_uri())
        picture = page.screenshot(full_page=True)
        browser.close()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(
        ROOT / "doc" / "report.png", optimize=True
    )


if __name__ == "__main__":
    main()
