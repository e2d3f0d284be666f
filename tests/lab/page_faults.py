"""What is wrong with how a page of the documentation is laid out: read from the page itself, in a browser."""

from __future__ import annotations

from tests.lab.browser import Page

#: What WCAG 2 (1.4.3, level AA) asks of text, and of large text.
CONTRAST, LARGE_CONTRAST = 4.5, 3.0

_LAYOUT = r"""
(() => {
  const faults = [], wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  const name = e => e.tagName.toLowerCase() + (e.className ? '.' + e.className : '') + ' '
    + e.textContent.trim().slice(0, 40);
  if (wide > 0) {
    const beyond = [...document.querySelectorAll('.md-content *, main *')]
      .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && e.checkVisibility()).slice(0, 3);
    faults.push(`the page is ${wide} pixels too wide: ${beyond.map(name).join('; ')}`);
  }
  for (const e of document.querySelectorAll('article :is(pre, table, p, li, h1, h2, h3, dd)')) {
    const style = getComputedStyle(e);
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0 && ['hidden', 'clip'].includes(style.overflowX))
      faults.push(`cut off: ${name(e)}`);
  }
  return faults;
})()
"""
_CONTENT = r"""
(() => {
  const faults = [];
  for (const image of document.images)
    if (!image.complete || image.naturalWidth === 0) faults.push(`an image is not there: ${image.src}`);
  const headings = [...document.querySelectorAll('article :is(h1, h2, h3, h4, h5, h6)')];
  const levels = headings.map(e => Number(e.tagName[1]));
  if (levels.filter(level => level === 1).length !== 1 || levels[0] !== 1)
    faults.push(`levels of headings: ${levels.slice(0, 9)}`);
  levels.forEach((level, at) => {
    if (at && level > levels[at - 1] + 1)
      faults.push(`h${levels[at - 1]} is followed by h${level}: ${headings[at].textContent}`);
    if (!headings[at].textContent.replace('\u00b6', '').trim()) faults.push(`an empty h${level}`);
  });

  const parse = text => { const n = text.match(/[\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (above, below) => [0, 1, 2].map(i => above[i] * above[3] + below[i] * (1 - above[3])).concat(1);
  const light = color => {
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.slice(0, 3).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = new Map();
  const ground = e => {
    if (!e) return [255, 255, 255, 1];
    if (!grounds.has(e)) grounds.set(e, over(parse(getComputedStyle(e).backgroundColor), ground(e.parentElement)));
    return grounds.get(e);
  };
  const seen = new Set(), texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || e.closest('script, style, svg, noscript, .headerlink')) continue;
    const style = getComputedStyle(e), key = [style.color, ground(e), style.fontSize, style.fontWeight].join();
    if (seen.has(key)) continue;
    if (!e.checkVisibility({opacityProperty: true, visibilityProperty: true}) || !e.getClientRects().length) continue;
    seen.add(key);
    const size = parseFloat(style.fontSize), is_large = size >= 24 || size >= 18.66 && Number(style.fontWeight) >= 700;
    const [one, two] = [light(over(parse(style.color), ground(e))), light(ground(e))].sort((a, b) => b - a);
    const ratio = (one + 0.05) / (two + 0.05);
    if (ratio < (is_large ? LARGE : SMALL))
      faults.push(`contrast ${ratio.toFixed(2)}: ${style.color} on ${ground(e).slice(0, 3).map(Math.round)}: `
        + `${e.tagName.toLowerCase()}.${e.className} ${texts.currentNode.textContent.trim().slice(0, 30)}`);
  }
  return faults;
})()
""".replace("LARGE", str(LARGE_CONTRAST)).replace("SMALL", str(CONTRAST))

#: Colours change at once, and the page has heard of the scheme: it is told before a frame is drawn.
SETTLE = """
(() => {
  document.head.insertAdjacentHTML('beforeend', '<style>*, ::before, ::after { transition: none !important }</style>');
  return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))));
})()
"""


def page_faults(page: Page, url: str, widths: tuple[int, ...]) -> list[str]:
    """Open a page once, look at it light and dark, and give it each width; returns what is wrong, in words.

    Nothing may be wider than the window or be cut off, every image and file must be there and come from the page's own
    host, headings have one h1 and no gaps, text has contrast, and the console no errors.
    """
    page.errors.clear()
    page.resize(widths[0], 900)
    page.set_dark(False)
    page.open(url)
    page.evaluate(SETTLE)
    found = list(page.evaluate(_CONTENT))
    page.set_dark(True)
    page.evaluate(SETTLE)
    found += [f"dark: {fault}" for fault in page.evaluate(_CONTENT) if fault not in found]
    for width in widths:
        page.resize(width, 900)
        found += [f"{width} pixels: {fault}" for fault in page.evaluate(_LAYOUT)]
    host = url.split("/")[2]
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    found += [f"from another host: {name}" for name in loaded if name.split("/")[2:3] not in ([host], [])]
    return found + page.errors
