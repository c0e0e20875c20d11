"""Looks at a report in headless Chromium.

  report_browser.py [CHECK FOLDER]...

FOLDER holds report.html, and expected.json: what its pictures must show. Prints
what is wrong and ends with 1, or ends with 0.
"""

import json
import pathlib
import re
import shutil
import sys

from playwright.sync_api import sync_playwright

WIDTHS = (400, 800, 1400)
problems = []


def check(holds, problem):
    if not holds:
        problems.append(problem)


class Page:
    """The report at one width, and what its loading did. A tab takes much longer to
    open than a page to load, so there is one tab for each kind of context."""

    tabs = {}

    def __init__(self, browser, folder, width=1400, **context):
        self.url = (folder / "report.html").resolve().as_uri()
        kind = (browser, *sorted(context.items()))
        if kind not in Page.tabs:
            Page.tabs[kind] = browser.new_context(**context).new_page()
        self.page = Page.tabs[kind]
        self.page.set_viewport_size({"width": width, "height": 900})
        self.console = []
        self.requests = []
        self.listeners = {
            "console": lambda m: self.console.append(m.text),
            "pageerror": lambda e: self.console.append(str(e)),
            "request": lambda r: self.requests.append(r.url)}
        for event, listener in self.listeners.items():
            self.page.on(event, listener)
        self.page.goto(self.url)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """The next page finds the tab as a new one is."""
        for event, listener in self.listeners.items():
            self.page.remove_listener(event, listener)
        self.page.mouse.move(0, 0)
        self.page.emulate_media(media="null")

    def js(self, script, argument=None):
        return self.page.evaluate(script, argument)


def quiet(browser, folder):
    """Asks for nothing, says nothing, and is whole without scripts."""
    texts = []
    for scripts in (True, False):
        with Page(browser, folder, java_script_enabled=scripts) as p:
            check(p.requests == [p.url], f"requests: {p.requests}")
            check(p.console == [], f"console: {p.console}")
            check(p.page.title() != "run", "a script of a text has run")
            text = p.page.locator("body").inner_text()
            for player in p.page.locator(".player").all_inner_texts():
                text = text.replace(player, "")
            texts.append(" ".join(text.split()))
            shown = p.page.locator("svg").count()
            check(shown == 0 or p.page.locator("svg rect").count() > 0,
                  "pictures without bars")
    check(texts[0] == texts[1], "scripts change the text")


BOXES = """() => {
  const box = e => { const b = e.getBoundingClientRect();
    return [b.left, b.top, b.right, b.bottom]; };
  return [...document.querySelectorAll('figure')].map(figure => ({
    id: figure.id, box: box(figure),
    texts: [...figure.querySelectorAll('svg text, figcaption *')]
      .filter(t => t.children.length === 0 && t.textContent.trim() &&
                   t.getBoundingClientRect().width > 0)
      .map(t => ({text: t.textContent, box: box(t)}))}));
}"""

OVERFLOW = """() => [...document.querySelectorAll(
    'h1,h2,h3,p,dt,dd,.tile,.tile .value,figcaption,.key,main,.facts div')]
  .filter(e => e.scrollWidth > e.clientWidth + 1 &&
               getComputedStyle(e).display !== 'inline')
  .map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60))
"""


def layout(browser, folder):
    """Texts neither overlap nor leave their boxes, at each width."""
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            wide = p.js("document.documentElement.scrollWidth")
            check(wide <= width, f"{width}: the page is {wide} wide")
            for text in p.js(OVERFLOW):
                check(False, f"{width}: text overflows: {text}")
            for figure in p.js(BOXES):
                check_texts(width, figure)


def check_texts(width, figure):
    left, top, right, bottom = figure["box"]
    texts = figure["texts"]
    for t in texts:
        a = t["box"]
        inside = a[0] >= left - 1 and a[2] <= right + 1
        check(inside and a[1] >= top - 1 and a[3] <= bottom + 1,
              f"{width}: {figure['id']}: outside: {t['text']!r} {a}")
    for i, t in enumerate(texts):
        for other in texts[:i]:
            a, b = t["box"], other["box"]
            # Boxes are of lines; the glyphs in them are a little smaller.
            apart = (a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] + 2
                     or b[3] <= a[1] + 2)
            check(apart, f"{width}: {figure['id']}: {t['text']!r} overlaps "
                         f"{other['text']!r}")


RANKS = """id => {
  const box = e => { const b = e.getBoundingClientRect();
    return {left: b.left, top: b.top, right: b.right, bottom: b.bottom}; };
  const figure = document.getElementById(id);
  const svg = figure.querySelector('.plot > svg');
  return {picture: box(svg),
    ranks: [...figure.querySelectorAll('.rank')].map(g => ({
      rank: +g.dataset.rank,
      bars: [...g.querySelectorAll('rect')].map(r => ({
        kind: r.getAttribute('class'), box: box(r),
        fill: getComputedStyle(r).fill,
        title: r.textContent}))}))};
}"""


def drawing(browser, folder):
    """The bars of each rank are there, and where the timeline says."""
    expected = json.loads((folder / "expected.json").read_text())
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            drawn = p.js(RANKS, expected["id"])
            box = drawn["picture"]
            ranks = {r["rank"]: r["bars"] for r in drawn["ranks"]}
            check(sorted(ranks) == [r["rank"] for r in expected["ranks"]],
                  f"ranks drawn: {sorted(ranks)}")
            for rank in expected["ranks"]:
                check_rank(width, expected, box, rank, ranks[rank["rank"]])
            last = 0
            for rank in sorted(ranks):
                top = min(b["box"]["top"] for b in ranks[rank])
                check(top >= last, f"rank {rank} lies over the one before")
                last = max(b["box"]["bottom"] for b in ranks[rank])


def check_rank(width, expected, box, rank, bars):
    begin, end = expected["window"]
    scale = (box["right"] - box["left"]) / (end - begin)
    for bar in bars:
        b = bar["box"]
        check(b["left"] >= box["left"] - 0.5 and b["right"] <= box["right"] + 0.5
              and b["top"] >= box["top"] - 0.5
              and b["bottom"] <= box["bottom"] + 0.5,
              f"{width}: a bar of rank {rank['rank']} is outside: {bar}")
    for kind in ("ov", "ex", "da", "fw", "bw", "op"):
        drawn = sorted((b["box"]["left"], b["box"]["right"])
                       for b in bars if b["kind"] == kind)
        wanted = [(box["left"] + scale * (t[0] - begin),
                   box["left"] + scale * (t[1] - begin))
                  for t in rank[kind]]
        check(len(drawn) == len(wanted),
              f"rank {rank['rank']}: {len(drawn)} bars {kind}, "
              f"not {len(wanted)}")
        for d, w in zip(drawn, wanted):
            check(abs(d[0] - w[0]) < 0.6 and abs(d[1] - w[1]) < 0.6,
                  f"{width}: rank {rank['rank']} {kind}: {d}, not {w}")
    fills = {b["kind"]: b["fill"] for b in bars}
    if "ov" in fills and "ex" in fills:
        check(fills["ov"] != fills["ex"], "overlapped looks like exposed")
    check(all(b["title"] for b in bars if b["kind"] != "idle"),
          "a bar without its title")


CURVES = """() => [...document.querySelectorAll('figure.chart')].map(f => {
  const b = e => { const r = e.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom]; };
  return {id: f.id, plot: b(f.querySelector('.curves')),
    paths: [...f.querySelectorAll('path')].map(p => ({
      kind: p.getAttribute('class'), d: p.getAttribute('d'), box: b(p)}))};
})"""


def curves(browser, folder):
    """Curves have a point for each value, inside of their plots."""
    expected = json.loads((folder / "expected.json").read_text())
    with Page(browser, folder) as p:
        charts = {c["id"]: c for c in p.js(CURVES)}
    check(sorted(charts) == sorted(expected["curves"]),
          f"charts: {sorted(charts)}")
    for name, points in expected["curves"].items():
        chart = charts[name]
        for path in chart["paths"]:
            count = len(re.findall("[ML]", path["d"]))
            check(count in points, f"{name}: {path['kind']}: {count} points, "
                                   f"not {points}")
            a, b = path["box"], chart["plot"]
            check(a[0] >= b[0] - 1 and a[2] <= b[2] + 1 and
                  a[1] >= b[1] - 1 and a[3] <= b[3] + 1,
                  f"{name}: a curve leaves its plot: {a} {b}")
        spots = [tuple(map(float, s.split())) for s in re.findall(
            r"[ML]([-\d.]+ [-\d.]+)", next(
                p["d"] for p in chart["paths"]
                if p["kind"].startswith("line")))]
        check(spots[0][0] < spots[-1][0] or len(spots) == 1,
              f"{name}: does not run from left to right")
    loss = charts["loss"]["paths"][1]["d"]
    heights = [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", loss)]
    check(heights[-1] > heights[0] + 50, "the loss does not fall")


COLORS = """() => {
  const of = (selector, property) => {
    const e = document.querySelector(selector);
    return e && getComputedStyle(e)[property];
  };
  return {
    paper: of('body', 'backgroundColor'),
    texts: ['h1', '.tile dt', '.value', '.note', 'td', 'dd', 'footer', '.key',
            '.now'].map(s => [s, of(s, 'color')]),
    labels: ['.tick', '.name', '.share'].map(s => [s, of(s, 'fill')]),
    bars: ['.bw', '.op', '.ex', '.da'].map(s => ['rect' + s,
                                                 of('rect' + s, 'fill')]),
    lines: ['.line.c1', '.line.c2'].map(s => [s, of(s, 'stroke')]),
    hatch: of('.hatch-line', 'fill'), exposed: of('rect.ex', 'fill')};
}"""


def channels(color):
    return [float(c) for c in re.findall(r"[\d.]+", color)][:3]


def luminance(color):
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045
              else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def colors(browser, folder):
    """Light, dark and print: other colours, all with enough contrast."""
    papers = {}
    for name, context, media in (
            ("light", "light", "screen"), ("dark", "dark", "screen"),
            ("print of dark", "dark", "print")):
        with Page(browser, folder, color_scheme=context) as p:
            p.page.emulate_media(media=media, color_scheme=context)
            c = p.js(COLORS)
        papers[name] = c["paper"]
        for group, least in (("texts", 4.5), ("labels", 4.5), ("bars", 2.9),
                             ("lines", 3.0)):
            for selector, color in c[group]:
                check(color, f"{selector} is not there")
                ratio = contrast(color, c["paper"]) if color else 99
                check(ratio >= least,
                      f"{name}: {selector} has contrast {ratio:.2f} < {least}")
        check(c["hatch"] != c["exposed"], f"{name}: marks of one colour")
    check(luminance(papers["light"]) > 0.9, f"light paper: {papers['light']}")
    check(luminance(papers["dark"]) < 0.05, f"dark paper: {papers['dark']}")
    check(papers["print of dark"] == papers["light"], "dark paper is printed")


STACKS = """() => {
  const svg = document.querySelector('#prediction > svg');
  const whole = svg.getBoundingClientRect();
  const rows = [];
  for (const e of svg.children) {
    if (e.matches('text.name')) rows.push({name: e.textContent, bars: []});
    if (e.tagName !== 'rect') continue;
    const box = e.getBoundingClientRect();
    rows.at(-1).bars.push({color: e.getAttribute('class'),
      begin: (box.left - whole.left) / whole.width,
      end: (box.right - whole.left) / whole.width,
      title: e.textContent, top: box.top});
  }
  return rows;
}"""


def prediction(browser, folder):
    """Both bars have their parts, in their colours, to one scale."""
    expected = json.loads((folder / "expected.json").read_text())
    scale = max(sum(p[1] for p in parts) for parts in expected.values())
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            rows = p.js(STACKS)
        check([r["name"] for r in rows] == ["predicted", "measured"],
              f"{width}: rows {[r['name'] for r in rows]}")
        for row in rows:
            wanted, at = [], 0
            for color, seconds in expected[row["name"]]:
                if seconds / scale >= 0.0005:
                    wanted.append((color, at / scale, (at + seconds) / scale))
                at += seconds
            check(len(wanted) == len(row["bars"]),
                  f"{width}: {row['name']}: {len(row['bars'])} bars")
            for bar, (color, begin, end) in zip(row["bars"], wanted):
                check(bar["color"] == color
                      and abs(bar["begin"] - begin) < 0.003
                      and abs(bar["end"] - end) < 0.003,
                      f"{width}: {row['name']}: {bar}, not {color} "
                      f"{begin:.3f} {end:.3f}")
                check(bar["title"].startswith(row["name"]), "a bar untold")
        check(rows[0]["bars"][0]["top"] < rows[1]["bars"][0]["top"],
              "bars over one another")


SHARDS = """id => {
  const box = e => { const b = e.getBoundingClientRect();
    return {left: b.left, top: b.top, right: b.right, bottom: b.bottom}; };
  const svg = document.getElementById(id + '-t').parentElement;
  return {picture: box(svg), scale: svg.viewBox.baseVal.width /
      svg.getBoundingClientRect().width,
    stripes: [...svg.querySelectorAll('rect')].map(r => ({
      color: getComputedStyle(r).fill, title: r.textContent,
      x: +r.getAttribute('x'), y: +r.getAttribute('y'),
      width: +r.getAttribute('width'), height: +r.getAttribute('height'),
      box: box(r)}))};
}"""


def shards(browser, folder):
    """Each rank's part of a matrix is as long as it is, in its colour."""
    expected = json.loads((folder / "expected.json").read_text())
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            colors = {}
            for matrix in expected:
                check_matrix(width, matrix, p.js(SHARDS, matrix["id"]), colors)
            check(len(set(colors.values())) == len(colors),
                  f"ranks of one colour: {colors}")


def check_matrix(width, matrix, drawn, colors):
    begin, length = ("x", "width") if matrix["vertical"] else ("y", "height")
    stripes = drawn["stripes"]
    start = min(s[begin] for s in stripes)
    whole = max(s[begin] + s[length] for s in stripes) - start
    place = f"{width}: {matrix['id']}"
    found = {}
    for s in stripes:
        ranks = s["title"].split(":")[0]
        first = round((s[begin] - start) / whole * matrix["size"])
        last = round((s[begin] + s[length] - start) / whole * matrix["size"])
        found.setdefault(s["color"], []).append((first, last, ranks))
        check(s["box"]["left"] >= drawn["picture"]["left"] - 1 and
              s["box"]["right"] <= drawn["picture"]["right"] + 1,
              f"{place}: a stripe is outside")
    check(abs(drawn["scale"] - 1) < 0.01, f"{place}: is shrunk")
    area = sum(s["width"] * s["height"] for s in stripes)
    across = stripes_across(stripes, matrix["vertical"])
    check(abs(area - whole * across) < 1, f"{place}: stripes overlap or leave "
                                          f"gaps")
    for rank in {s[0] for s in matrix["stripes"]}:
        wanted = sorted((s[1], s[2]) for s in matrix["stripes"] if s[0] == rank)
        color = next((c for c, parts in found.items()
                      if same_ranges(parts, wanted, matrix["size"])), None)
        check(color, f"{place}: rank {rank} is not drawn as {wanted}: {found}")
        check(colors.setdefault(rank, color) == color,
              f"{place}: rank {rank} has another colour")
        found.pop(color, None)
    check(not found, f"{place}: nobody's: {found}")


def stripes_across(stripes, vertical):
    begin, length = ("y", "height") if vertical else ("x", "width")
    return (max(s[begin] + s[length] for s in stripes) -
            min(s[begin] for s in stripes))


def same_ranges(parts, wanted, size):
    """Whether the parts, joined where they touch, are the wanted ranges."""
    joined = []
    for first, last, _ in sorted(parts):
        if joined and abs(joined[-1][1] - first) <= 1:
            joined[-1][1] = last
        else:
            joined.append([first, last])
    whole = []
    for first, last in wanted:
        if whole and whole[-1][1] == first:
            whole[-1][1] = last
        else:
            whole.append([first, last])
    near = 1 + size / 2000
    return len(joined) == len(whole) and all(
        abs(a - b) <= near for j, w in zip(joined, whole)
        for a, b in zip(j, w))


INKS = """() => [...document.querySelectorAll('.shard-item svg')].flatMap(svg =>
  [...svg.querySelectorAll('.n, .s')].map(t => {
    const b = t.getBoundingClientRect();
    const under = [...svg.querySelectorAll('rect')].find(r => {
      const a = r.getBoundingClientRect();
      return a.left <= b.left && b.right <= a.right &&
             a.top <= b.top + 2 && b.bottom <= a.bottom + 2; });
    return {text: t.textContent, ink: getComputedStyle(t).fill,
            ground: under ? getComputedStyle(under).fill : null}; }))"""


def inks(browser, folder):
    """Numbers in the parts of matrices stand in them, and can be read."""
    for scheme in ("light", "dark"):
        with Page(browser, folder, color_scheme=scheme) as p:
            texts = p.js(INKS)
        check(len(texts) > 20, "numbers are missing")
        for t in texts:
            check(t["ground"], f"{scheme}: {t['text']} leaves its part")
            ratio = contrast(t["ink"], t["ground"]) if t["ground"] else 99
            check(ratio >= 4.5, f"{scheme}: {t['text']} has {ratio:.2f}")


STRUCTURE = """() => ({
  pictures: [...document.querySelectorAll('svg[role=img]')].map(s =>
    s.getAttribute('aria-labelledby').split(' ').map(
      id => (document.getElementById(id) || {}).textContent || '')),
  unnamed: [...document.querySelectorAll('svg:not([role=img])')].filter(s =>
    !s.closest('[role=img]') && s.getAttribute('aria-hidden') !== 'true')
    .length,
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  headings: [...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => +h.tagName[1]),
  lang: document.documentElement.lang,
  rows: [...document.querySelectorAll('tbody th')].map(e => e.scope)
})"""


def structure(browser, folder):
    """Pictures have names and descriptions, headings are in order, it prints.
    """
    with Page(browser, folder) as p:
        s = p.js(STRUCTURE)
        check(s["lang"] == "en", "no language")
        check(s["unnamed"] == 0, f"{s['unnamed']} pictures without a name")
        check(len(s["pictures"]) >= 4, "pictures are missing")
        for texts in s["pictures"]:
            check(len(texts) == 2 and all(texts), f"a picture's name: {texts}")
        check(len(set(s["ids"])) == len(s["ids"]), "an id is there twice")
        check(s["headings"][0] == 1 and s["headings"].count(1) == 1,
              "not one first heading")
        steps = zip(s["headings"], s["headings"][1:])
        check(all(b <= a + 1 for a, b in steps), f"headings {s['headings']}")
        check(set(s["rows"]) == {"row"}, "rows of a table without heads")
        pdf = p.page.pdf(format="A4", margin={
            "top": "12mm", "bottom": "12mm", "left": "12mm", "right": "12mm"})
        pages = len(re.findall(rb"/Type\s*/Page\b", pdf))
        check(1 <= pages <= 4, f"printed on {pages} pages")


TABLES = """() => {
  const lines = cell => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    return [...range.getClientRects()].filter(r => r.width > 0);
  };
  const main = document.querySelector('main').getBoundingClientRect();
  return {
    rows: [...document.querySelectorAll('tbody tr')].map(row => ({
      text: row.textContent.slice(0, 40),
      tops: [...row.children].filter(cell => cell.textContent.trim())
        .map(cell => lines(cell)).filter(all => all.length)
        .map(all => all[0].top)})),
    wide: [...document.querySelectorAll('table')].filter(table =>
      table.getBoundingClientRect().right > main.right + 1)
      .map(table => table.caption.textContent),
    unmarked: [...document.querySelectorAll('main *')].filter(e =>
      e.tagName !== 'PRE' && e.scrollWidth > e.clientWidth + 1 &&
      getComputedStyle(e).overflowX === 'auto' &&
      !getComputedStyle(e).backgroundImage.includes('gradient'))
      .map(e => e.className)};
}"""


def tables(browser, folder):
    """Rows are aligned, what scrolls has shadows, and tables fit on paper."""
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            drawn = p.js(TABLES)
        for row in drawn["rows"]:
            tops = row["tops"] or [0]
            check(max(tops) - min(tops) <= 2,
                  f"{width}: a row is not aligned: {row}")
        check(not drawn["unmarked"],
              f"{width}: scrolls unseen: {drawn['unmarked']}")
    # A4 without margins of 12 mm.
    with Page(browser, folder, 703) as p:
        p.page.emulate_media(media="print")
        wide = p.js(TABLES)["wide"]
        check(not wide, f"wider than paper: {wide}")


PIPELINE = """id => {
  const box = e => { const b = e.getBoundingClientRect();
    return {left: b.left, top: b.top, right: b.right, bottom: b.bottom}; };
  const figure = document.getElementById(id);
  const data = JSON.parse(figure.closest('.pipes').querySelector('script')
    .textContent).pictures.find(p => p.id === id);
  return {picture: box(figure.querySelector('.plot > svg')),
    bubble: figure.querySelector('.bubble').textContent,
    rows: [...figure.querySelectorAll('.prow')].map((g, row) => ({
      name: data.rows[row].name,
      texts: [...g.querySelectorAll('.n')]
        .filter(t => t.getBoundingClientRect().width > 0)
        .map(t => ({text: t.textContent, box: box(t),
                    fill: getComputedStyle(t).fill})),
      blocks: [...g.querySelectorAll('rect:not(.gap)')].map((r, i) => ({
        kind: r.getAttribute('class')[1].toUpperCase(),
        microbatch: data.rows[row].blocks[i][1], box: box(r),
        fill: getComputedStyle(r).fill,
        title: r.textContent}))}))};
}"""


def pipeline(browser, folder):
    """Blocks are where the schedule says, with their numbers; the bubble."""
    expected = json.loads((folder / "expected.json").read_text())
    for width in WIDTHS:
        with Page(browser, folder, width) as p:
            for figure in expected["figures"]:
                drawn = p.js(PIPELINE, figure["id"])
                check(drawn["bubble"] == figure["bubble"],
                      f"bubble: {drawn['bubble']!r}, not {figure['bubble']!r}")
                check([r["name"] for r in drawn["rows"]] == figure["rows"],
                      f"rows: {[r['name'] for r in drawn['rows']]}")
                for index, row in enumerate(drawn["rows"]):
                    check_blocks(width, figure, index, row, drawn["picture"],
                                 expected["range"])


def check_blocks(width, figure, index, row, picture, whole):
    scale = (picture["right"] - picture["left"]) / whole
    wanted = [b for b in figure["blocks"] if b["row"] == index]
    check(len(row["blocks"]) == len(wanted),
          f"{figure['id']}, row {index}: {len(row['blocks'])} blocks, "
          f"not {len(wanted)}")
    for d, w in zip(row["blocks"], wanted):
        place = f"{width}: {figure['id']}, row {index}: {w}"
        check(d["kind"] == w["kind"] and d["microbatch"] == w["microbatch"],
              f"{place} is drawn as {d['kind']}{d['microbatch']}")
        left = picture["left"] + scale * w["begin"]
        right = picture["left"] + scale * w["end"]
        check(abs(d["box"]["left"] - left) < 0.6 and
              abs(d["box"]["right"] - right) < 0.6, f"{place}: {d['box']}")
        check(d["title"], f"{place} has no title")
        inside = [t for t in row["texts"]
                  if left - 1 < (t["box"]["left"] + t["box"]["right"]) / 2
                  < right + 1]
        if w["kind"] == "T":
            continue
        check(len(inside) == 1 or right - left < 25,
              f"{place}: {len(inside)} numbers in {right - left} px")
        for t in inside:
            check(t["text"] == w["label"], f"{place} says {t['text']!r}")
            check(t["box"]["left"] > left and t["box"]["right"] < right,
                  f"{place}: its number is wider")
            if "url" not in d["fill"]:
                check(contrast(t["fill"], d["fill"]) >= 4.5,
                      f"{place}: a number without contrast")


SCENE = """index => {
  const pipes = document.querySelectorAll('.pipes')[index];
  const box = e => { const b = e.getBoundingClientRect();
    return [b.left, b.top, b.right, b.bottom]; };
  return {
    cursors: [...pipes.querySelectorAll('.cursor')].map(c => ({
      x: parseFloat(c.getAttribute('x1')),
      shown: getComputedStyle(c).visibility === 'visible'})),
    says: pipes.querySelector('output').textContent,
    value: +pipes.querySelector('input').value,
    slots: [...pipes.querySelectorAll('.slot')].map(s => ({
      kind: s.className.replace('slot', '').trim().toUpperCase(),
      box: box(s)})),
    kept: [...pipes.querySelectorAll('.kept')].map(
      k => +k.textContent.match(/[0-9]+/)[0]),
    tokens: [...pipes.querySelectorAll('.token.shown')].map(t => ({
      text: t.textContent, row: +t.dataset.row, box: box(t),
      works: t.classList.contains('work')}))};
}"""


# The scene of each step, and that after a last click on "next".
SCENES = f"""count => Array.from({{length: count + 1}}, (_, step) => {{
  if (step > 0) document.querySelector('.player .next').click();
  return ({SCENE})(0);
}})"""


def running(figure, row, time):
    return next((b for b in figure["blocks"] if b["row"] == row and
                 b["kind"] != "T" and b["begin"] <= time < b["end"]), None)


def check_scene(place, figure, scene, time):
    """What the boxes say at a time is what the blocks say."""
    tokens = {(t["row"], t["text"]) for t in scene["tokens"] if t["works"]}
    for row in range(len(figure["rows"])):
        block = running(figure, row, time)
        slot = scene["slots"][row]
        kind = block["kind"] if block else ""
        check(slot["kind"] == kind,
              f"{place}: row {row} shows {slot['kind']!r}, not {kind!r}")
        own = [b for b in figure["blocks"] if b["row"] == row]
        begun = sum(b["kind"] == "F" and b["begin"] <= time for b in own)
        freed = sum(b["kind"] in "BW" and b["end"] <= time for b in own)
        check(scene["kept"][row] == begun - freed,
              f"{place}: row {row} keeps {scene['kept'][row]}, "
              f"not {begun - freed}")
        if block and block["kind"] != "W":
            number = str(block["microbatch"])
            check((row, number) in tokens,
                  f"{place}: microbatch {number} is not at row {row}")
    for t in scene["tokens"]:
        if not t["works"]:
            continue
        a, b = t["box"], scene["slots"][t["row"]]["box"]
        check(a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3],
              f"{place}: token {t['text']} {a} is outside of its box {b}")


def player(browser, folder):
    """Steps through the real step and the ideal one; keys play and pause."""
    expected = json.loads((folder / "expected.json").read_text())
    for width in WIDTHS[:2]:
        with Page(browser, folder, width, reduced_motion="reduce") as p:
            for index, figure in enumerate(expected["figures"]):
                play_through(p, width, figure, index, expected)
            check(p.console == [], f"console: {p.console}")
    with Page(browser, folder) as p:
        play_by_keys(p)
    with Page(browser, folder, java_script_enabled=False) as p:
        check(p.page.locator(".player").is_hidden(), "controls without script")
        check(p.page.locator(".prow rect:not(.gap)").count() ==
              sum(len(f["blocks"]) for f in expected["figures"]),
              "not all blocks without script")


def play_through(p, width, figure, index, expected):
    if len(expected["figures"]) > 1:
        p.page.select_option(".player select", str(index))
    steps = p.js("""id => JSON.parse(document.getElementById(id)
        .closest('.pipes').querySelector('script').textContent)
        .pictures.find(p => p.id === id).steps""", figure["id"])
    rows = {}
    last = -1
    scenes = p.js(SCENES, len(steps))
    for step, (at, scene) in enumerate(zip(steps, scenes), 1):
        place = f"{width}: {figure['id']}, t = {step}"
        check(scene["says"].startswith(f"t = {step} of {len(steps)}"),
              f"{place}: says {scene['says']!r}")
        check(scene["value"] == step, f"{place}: slider at {scene['value']}")
        for cursor in scene["cursors"]:
            shown = cursor["shown"] or step == 1
            check(abs(cursor["x"] - float(at)) < 1e-6 and shown,
                  f"{place}: cursor {cursor}, not at {at}")
        check(float(at) > last, f"{place}: time stands still")
        last = float(at)
        check_scene(place, figure, scene, last / 100 * expected["range"])
        for t in scene["tokens"]:
            rows.setdefault(t["text"], []).append(t["row"])
    ends = scenes[-1]["value"]
    check(ends == len(steps), f"{figure['id']}: goes on to {ends}")
    for token, way in rows.items():
        check(set(way) == set(range(len(figure["rows"]))),
              f"{figure['id']}: microbatch {token} was at rows {set(way)} only")
    p.page.click(".player .previous")
    check(p.js(SCENE, 0)["value"] == len(steps) - 1, "previous does nothing")


def play_by_keys(p):
    check(not any(c["shown"] for c in p.js(SCENE, 0)["cursors"]),
          "the still has a cursor")
    p.page.locator(".player .play").focus()
    p.page.keyboard.press("Enter")
    value = "() => +document.querySelector('.player input').value"
    p.page.wait_for_function(f"() => ({value})() >= 3")
    check(p.page.locator(".player .play").inner_text() == "Pause",
          "the button does not say Pause")
    check(p.js(SCENE, 0)["cursors"][0]["shown"], "no cursor while it plays")
    p.page.keyboard.press(" ")
    check(p.page.locator(".player .play").inner_text() == "Play",
          "a key does not pause")
    at = p.js(value)
    p.page.locator(".player input").focus()
    p.page.keyboard.press("ArrowRight")
    check(p.js(value) == at + 1, "the slider has no keys")
    scene = p.js(SCENE, 0)
    check(scene["says"].startswith(f"t = {at + 1} "), f"says {scene['says']}")


def hover(browser, folder):
    """Blocks of a large picture say what they are when pointed at."""
    with Page(browser, folder) as p:
        block = p.page.locator(".prow rect:not(.gap)").nth(5)
        check(block.locator("title").count() == 0, "it has a title")
        block.hover()
        tip = p.page.locator(".tip")
        check(tip.count() == 1 and "forward of 5" in tip.inner_text(),
              f"no tip: {tip.all_inner_texts()}")
        p.page.locator("h1").hover()
        check(tip.count() == 0, "the tip stays")


def main():
    looks = list(zip(sys.argv[1::2], sys.argv[2::2]))
    checks = {f.__name__: f for f in (
        quiet, layout, drawing, curves, colors, structure, pipeline, player,
        hover, shards, inks, prediction, tables)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        for number, (name, folder) in enumerate(looks):
            before = len(problems)
            checks[name](browser, pathlib.Path(folder))
            for problem in problems[before:before + 20]:
                print(f"{pathlib.Path(folder).parent.name}, page {number}, {name}: {problem}")
        browser.close()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
