"""Looks at a plan's page in headless Chromium.

  plan_page_browser.py FOLDER...

FOLDER holds report.html and expected.json: what the page must show, from the
plan. Prints what is wrong and ends with 1, or ends with 0.
"""

import json
import pathlib
import shutil
import sys

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "report"))
from report_browser import (  # noqa: E402
    WIDTHS, Page, check, contrast, layout, luminance, problems, quiet)

BARS = """() => {
  const box = e => { const b = e.getBoundingClientRect();
    return {left: b.left, right: b.right, top: b.top}; };
  const svg = document.querySelector('#memory > svg');
  return {picture: box(svg), limit: box(svg.querySelector('.limit')).left,
    names: [...svg.querySelectorAll('.name')].map(t => t.textContent),
    totals: [...svg.querySelectorAll('.share')].map(t => t.textContent),
    rects: [...svg.querySelectorAll('rect')].map(r => ({
      box: box(r), title: r.textContent}))};
}"""


def bars(browser, folder):
    """Each bar is as long, against the limit, as the memory is."""
    expected = json.loads((folder / "expected.json").read_text())
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            drawn = p.js(BARS)
        left = drawn["picture"]["left"]
        room = drawn["limit"] - left
        tops = sorted({r["box"]["top"] for r in drawn["rects"]})
        check(len(tops) == len(drawn["names"]), f"{len(tops)} bars")
        check(len(tops) >= len(expected["bars"]), "bars are missing")
        for bar, top, name in zip(expected["bars"], tops, drawn["names"]):
            row = sorted((r["box"]["left"], r["box"]["right"], r["title"])
                         for r in drawn["rects"] if r["box"]["top"] == top)
            check(bar["name"] in name, f"{name!r}, not {bar['name']!r}")
            check(abs(row[0][0] - left) < 0.6, f"{name} begins at {row[0][0]}")
            for one, next_one in zip(row, row[1:]):
                check(abs(one[1] - next_one[0]) < 0.6, f"{name} has a gap")
            check(all(title for _, _, title in row), f"{name}: no titles")
            wanted = min(left + room * bar["of_limit"],
                         drawn["picture"]["right"])
            check(abs(row[-1][1] - wanted) < 1.5,
                  f"{width}: {name} ends at {row[-1][1]}, not {wanted}")


SAID = """id => [...document.querySelectorAll('#' + id + ' .point')].filter(
    g => getComputedStyle(g.querySelector('foreignObject')).display !== 'none')
  .map(g => g.querySelector('.says').textContent)"""

# What is said while each point has the focus, one after the other.
FOCUSED = f"""id => [...document.querySelectorAll('#' + id + ' .point')].map(g => {{
  g.focus();
  return ({SAID})(id); }})"""

PLACES = """id => [...document.querySelectorAll('#' + id + ' .point')].map(g => {
  const b = g.querySelector('circle').getBoundingClientRect();
  return {x: (b.left + b.right) / 2, y: (b.top + b.bottom) / 2,
          name: document.getElementById(g.getAttribute('aria-labelledby'))
                  .textContent}; })"""


def points(browser, folder):
    """Points tell their layouts when pointed at, focused and tapped."""
    expected = json.loads((folder / "expected.json").read_text())
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            for plane in ("choices", "growth"):
                told = sorted(s["name"] for s in p.js(PLACES, plane))
                check(len(told) == len(expected[plane]),
                      f"{plane}: {len(told)} points")
                for text in expected[plane]:
                    check(any(text in one for one in told),
                          f"{plane}: nobody tells {text}")
                each_way(p, width, plane)
    with Page(browser, folder, 400, has_touch=True) as p:
        tapped(p)


def each_way(p, width, plane):
    check(p.js(SAID, plane) == [], f"{plane}: speaks without being asked")
    places = p.js(PLACES, plane)
    for index, said in enumerate(p.js(FOCUSED, plane)):
        check(said == [places[index]["name"]],
              f"{width}: {plane} {index} has the focus; said is {said}")
    box = p.page.locator(f"#{plane} .point").nth(len(places) - 1).locator(".says").bounding_box()
    check(box["x"] >= 0 and box["x"] + box["width"] <= width + 1,
          f"{width}: {plane} says it outside of the page")
    p.js("document.activeElement.blur()")
    for index in (0, len(places) - 1):
        p.page.locator(f"#{plane}").scroll_into_view_if_needed()
        at = p.js(PLACES, plane)[index]
        p.page.mouse.move(at["x"], at["y"])
        said = p.js(SAID, plane)
        # Another one may lie above it.
        check(len(said) == 1, f"{width}: {plane} {index} pointed at: {said}")
    p.page.mouse.move(1, 1)
    check(p.js(SAID, plane) == [], f"{plane}: goes on speaking")


def tapped(p):
    point = p.page.locator("#growth .point").nth(0)
    point.scroll_into_view_if_needed()
    at = p.js(PLACES, "growth")[0]
    p.page.touchscreen.tap(at["x"], at["y"])
    said = p.js(SAID, "growth")
    check(said == [at["name"]], f"a tap says {said}")


STEP = """() => ({
  pictures: [...document.querySelectorAll('figure.pipe, figure.lanes')].map(
    f => f.querySelectorAll('.prow, .rank').length),
  players: document.querySelectorAll('.player').length,
  text: document.body.innerText,
  figures: [...document.querySelectorAll('figure')].map(f => f.id)})"""


def step(browser, folder):
    """One pipeline, or one rank, is drawn; words tell of the others."""
    expected = json.loads((folder / "expected.json").read_text())
    with Page(browser, folder) as p:
        page = p.js(STEP)
    for id in expected["figures"]:
        check(id in page["figures"], f"there is no {id}")
    check(("parts" in page["figures"]) == expected["fits"], "parts of a step")
    for rows in page["pictures"]:
        check(rows == expected["rows"], f"{rows} rows, not {expected['rows']}")
    check(bool(page["pictures"]) == expected["fits"], "no picture of the step")
    check(page["players"] == (1 if expected["rows"] > 1 else 0), "a player")
    for text in expected["texts"]:
        check(text in page["text"], f"does not say {text!r}")
    check("Measured" not in page["text"], "a plan claims to have measured")


COLORS = """() => {
  const of = (selector, property) =>
    [...document.querySelectorAll(selector)].map(
      e => [selector, getComputedStyle(e)[property]]);
  return {paper: getComputedStyle(document.body).backgroundColor,
    texts: ['h1', 'h2', 'h3', 'p', 'dt', 'dd', 'summary', '.key', '.now',
            '.hint', '.says', 'footer'].flatMap(s => of(s, 'color')),
    labels: ['.tick', '.name', '.share', '.level-name'].flatMap(
      s => of(s, 'fill')),
    marks: ['#memory rect:not(.idle)', '#parts rect:not(.idle)', '.point circle']
      .flatMap(s => of(s, 'fill')),
    lines: ['.line', '.level.limit'].flatMap(s => of(s, 'stroke'))};
}"""


def colors(browser, folder):
    """Light and dark: texts and marks stand out."""
    for scheme in ("light", "dark"):
        with Page(browser, folder, color_scheme=scheme) as p:
            c = p.js(COLORS)
        check((luminance(c["paper"]) > 0.5) == (scheme == "light"), "the paper")
        for group, least in (("texts", 4.5), ("labels", 4.5), ("marks", 2.0),
                             ("lines", 3.0)):
            check(c[group], f"no {group}")
            for selector, color in {tuple(one) for one in c[group]}:
                ratio = contrast(color, c["paper"])
                check(ratio >= least, f"{scheme}: {selector} has {ratio:.2f}")


def main():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        for folder in map(pathlib.Path, sys.argv[1:]):
            for one in (quiet, layout, bars, points, step, colors):
                before = len(problems)
                one(browser, folder)
                for problem in problems[before:before + 20]:
                    print(f"{folder.name}, {one.__name__}: {problem}")
        browser.close()
    sys.exit(1 if problems else 0)


main()
