#!/usr/bin/env python3
"""Takes all pictures of README.md and doc/: parts of pages that Echelon wrote.

  setup/picture.py [NAME …]      only doc/NAME.png

Run it in the environment of setup/extras.sh, after `make programs demo`, on
a machine with nothing else to do: what else runs shows in the pictures. A picture is
1200 pixels wide, with a palette, and at most 120 kB."""
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "runs" / "demo" / "report.html"
WIDTH = 1200
MOST_BYTES = 120_000

DIGITS = "echelon train examples/configs/digits.toml -n 2"
TEXT = ("echelon train examples/configs/text.toml -n 2 --set train.steps=40"
        " --set optimizer.warmup_steps=10 --set 'data.sources=[\"doc/*.md\"]'")
PIPELINE = ("echelon train examples/configs/digits.toml --layout pp=2"
            " --set train.run=runs/pipeline")
OWN = "echelon run -n 2 -- build/bin/06_own_model examples/configs/own_model.toml pp=2"
PLAN = "echelon plan --model gpt3-175b --cluster a100-80gb:1024 --batch 1536 --html plan.html"
SIMULATE = ("echelon simulate --model llama3.1-70b --cluster h100-sxm:32x8"
            " --layout fsdp=8,tp=8,pp=4 --batch 512 --run runs/simulated")
SCHEDULE = "echelon schedule --kind {0} --stages 4 --microbatches 8 --format html --output {0}.html"


LINK = "[id^=strategy-] > p:last-of-type"  # to the run's own report


def section(heading):
    return f"section:has(> h2:text-is('{heading}'))"


def heading(text):
    return f"h2:text-is('{text}')"


# Name, command that writes the page, page, what the picture begins and ends with,
# and what is left out in between.
PICTURES = (
    ("report", None, DEMO, "header", "#planned",
     "#settings, [id^=strategy-]:not(figure)"),
    ("data_parallel", None, DEMO, "#strategy-1", "#strategy-1", LINK),
    ("sharded", None, DEMO, "#strategy-2", "#strategy-2", LINK),
    ("tensor_parallel", None, DEMO, "#strategy-3", "#strategy-3", LINK),
    ("pipeline_parallel", None, DEMO, "#strategy-4", "#strategy-4", ".player, " + LINK),
    ("model_parallel", None, DEMO, "#strategy-5", "#strategy-5", ".player, " + LINK),
    ("tutorial_run", DIGITS, "runs/digits/report.html", "header", section("Learning"),
     "#findings"),
    ("tutorial_time", DIGITS, "runs/digits/report.html", section("Where the time went"),
     "#collectives", ""),
    ("own_model", OWN, "runs/own-pp=2/report.html", section("The pipeline, step by step"),
     section("The pipeline, step by step"), ".player"),
    ("explain", PIPELINE, "runs/pipeline/report.html", "#findings", "#findings", ""),
    ("plan", PLAN, "plan.html", "header", "#ranks-pp", ""),
    ("plan_step", PLAN, "plan.html", heading("Memory of a device"), "#parts", ""),
    ("simulated", SIMULATE, "runs/simulated/report.html",
     section("Where the time went"), section("Where the time went"), ""),
    ("schedule_1f1b", SCHEDULE.format("1f1b"), "1f1b.html", "#schedule", ".keys", ""),
    ("schedule_interleaved", SCHEDULE.format("interleaved"), "interleaved.html",
     "#schedule", ".keys", ""),
    ("schedule_zb_v", SCHEDULE.format("zb-v"), "zb-v.html", "#schedule", ".keys", ""),
    ("memory", TEXT, "runs/text/report.html", "#memory", "#memory", ""),
)


def write_page(command, folder, written):
    if command is None or command in written:
        return
    written.add(command)
    path = f"{ROOT}/build/bin:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, text=True,
                          env=dict(os.environ, PATH=path), stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != 0:
        sys.exit(f"{command}\n{done.stdout}")


def screenshot(page, first, last, left_out):
    if left_out:
        page.add_style_tag(content=left_out + "{display:none}")
    boxes = [page.locator(part).first.bounding_box() for part in (first, last)]
    top = max(0, min(box["y"] for box in boxes) - 16)
    bottom = max(box["y"] + box["height"] for box in boxes) + 2
    return page.screenshot(full_page=True, clip={
        "x": 40, "y": top, "width": 1120, "height": bottom - top})


def save(picture, path):
    """With as many colors as the size allows."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colors in (256, 128, 64):
        # Maximum coverage keeps colors of few pixels, such as those of lines.
        image.quantize(colors, method=Image.Quantize.MAXCOVERAGE,
                       dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= MOST_BYTES:
            print(f"{path.relative_to(ROOT)}: {image.width} x {image.height},"
                  f" {path.stat().st_size / 1000:.0f} kB")
            return
    sys.exit(f"{path}: {path.stat().st_size} bytes, more than {MOST_BYTES}; show less")


def main():
    from playwright.sync_api import sync_playwright

    names = sys.argv[1:] or [picture[0] for picture in PICTURES]
    written = set()
    with tempfile.TemporaryDirectory() as temp, sync_playwright() as playwright:
        folder = Path(temp)
        for name in ("build", "doc", "echelon", "examples", "README.md"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "runs").mkdir()
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox"] if os.geteuid() == 0 else [],
        )
        for name, command, source, first, last, left_out in PICTURES:
            if name not in names:
                continue
            write_page(command, folder, written)
            if not (folder / source).exists():
                sys.exit(f"{source} is missing: run \"make demo\" first")
            page = browser.new_page(
                viewport={"width": 1200, "height": 900}, color_scheme="light",
                device_scale_factor=WIDTH / 1120,
            )
            page.goto((folder / source).as_uri())
            save(screenshot(page, first, last, left_out), ROOT / "doc" / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
