"""The page around the sections: one HTML document that needs no script, no network and no font of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1rem 3rem; max-width: 78rem; background: #fff; color: #222;
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; line-height: 1.2; }
h2 { font-size: 1.25rem; margin: 0 0 0.5rem; line-height: 1.25; }
h3 { font-size: 1rem; margin: 1.25rem 0 0.25rem; }
p { margin: 0.4rem 0; max-width: 60rem; }
a { color: #00507d; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; margin: 0.75rem 0; list-style: none; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1rem; margin: 0.75rem 0; font-size: 0.9rem; }
dt { color: #555; }
dd { margin: 0; }
section { margin-top: 2rem; padding-top: 1.25rem; border-top: 1px solid #ccc; }
.seen { font-weight: 600; }
.how, figcaption { font-size: 0.875rem; color: #444; }
.missing { padding: 0.5rem 0.75rem; background: #f4f4f4; border-left: 4px solid #888; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21.5rem), 1fr)); gap: 1.25rem 1.5rem;
  margin-top: 0.75rem; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 36rem; }
figure.broad svg { min-width: 44rem; max-width: none; }
.pairs { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
.scroll { overflow-x: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 0.15rem 1.25rem; padding: 0; margin: 0.5rem 0; list-style: none;
  font-size: 0.875rem; }
.legend svg { width: 2.6rem; height: 1rem; vertical-align: -0.15rem; margin-right: 0.35rem; }
.legend i { display: inline-block; width: 0.9rem; height: 0.9rem; margin-right: 0.4rem; vertical-align: -0.1rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; margin-top: 0.5rem; }
caption { text-align: left; font-weight: 600; padding: 0.5rem 0 0.25rem; white-space: nowrap; }
th, td { padding: 0.2rem 0.75rem 0.2rem 0; text-align: left; white-space: nowrap; border-bottom: 1px solid #e2e2e2; }
th { border-bottom-color: #888; vertical-align: bottom; }
.number { text-align: right; }
@page { margin: 14mm; }
@media print {
  body { padding: 0; max-width: none; font-size: 10pt; color: #000; }
  nav { display: none; }
  section { break-before: page; margin-top: 0; border-top: 0; padding-top: 0; }
  section:first-of-type { break-before: auto; margin-top: 1rem; }
  h2, h3, caption { break-after: avoid; }
  figure, tr, .legend { break-inside: avoid; }
  .panels { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 3mm 6mm; }
  .panels.broad { display: block; }
  figure.broad svg { min-width: 0; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  th, td { padding-right: 0.5rem; }
  .how, figcaption, dt, p { color: #000; }
  .how, figcaption, .legend, dl { font-size: 8pt; line-height: 1.35; }
  figure:not(.broad) svg { max-height: 47mm; max-width: none; }
  a { color: #000; text-decoration: none; }
  a[href^="http"]::after { content: " (" attr(href) ")"; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """An ``svg`` element with its caption; one that is broad keeps its width and scrolls on narrow screens."""

    svg: str
    caption: str
    broad: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells as text; ``numbers`` are the columns that are aligned to the right."""

    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page.

    Attributes:
        key: names it in links.
        title: its heading.
        seen: what is seen, in words.
        how: how to read its figures.
        legend: (swatch, name) pairs; a swatch is an element of ours or a colour.
        pictures: its figures.
        tables: below them.
        pairs: the figures belong together two by two.
        missing: why there is nothing to see; then the fields between are empty.
    """

    key: str
    title: str
    seen: str = ""
    how: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    pairs: bool = False
    missing: str = ""


def render(title: str, facts: Sequence[tuple[str, str]], note: str, sections: Sequence[Section]) -> str:
    """Returns the document. All text is escaped; ``note`` is HTML of ours, the pictures are ``svg`` elements."""
    links = "".join(f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in sections)
    given = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    parts = "\n".join(_section(part) for part in sections)
    # The policy makes sure of it: nothing is fetched and no script runs, whatever a name in the results contains.
    document = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{note}</p>
<dl>{given}</dl>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{parts}
</main>
</body>
</html>
"""
    return document.replace(" %", "&nbsp;%")


def _section(part: Section) -> str:
    inner = [f'<section id="{part.key}" aria-labelledby="{part.key}-title">']
    inner.append(f'<h2 id="{part.key}-title">{escape(part.title)}</h2>')
    if part.missing:
        inner.append(f'<p class="missing">{escape(part.missing)}</p>')
    if part.seen:
        inner.append(f'<p class="seen">{escape(part.seen)}</p>')
    if part.how:
        inner.append(f'<p class="how">{escape(part.how)}</p>')
    if part.legend:
        entries = "".join(f"<li>{_swatch(swatch)}{escape(name)}</li>" for swatch, name in part.legend)
        inner.append(f'<ul class="legend" aria-label="Legend">{entries}</ul>')
    if part.pictures:
        kind = " broad" if any(picture.broad for picture in part.pictures) else " pairs" if part.pairs else ""
        inner.append(f'<div class="panels{kind}">{"".join(map(_picture, part.pictures))}</div>')
    inner.extend(_table(table) for table in part.tables)
    return "\n".join([*inner, "</section>"])


def _swatch(swatch: str) -> str:
    return swatch if swatch.startswith("<") else f'<i style="background:{swatch}"></i>'


def _picture(picture: Picture) -> str:
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    if picture.broad:
        held = f'<div class="scroll" tabindex="0" role="group" aria-label="Figure, scrolls">{picture.svg}</div>'
        return f'<figure class="broad">{held}{caption}</figure>\n'
    return f"<figure>{picture.svg}{caption}</figure>\n"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' scope=col' if tag == 'th' else ''}"
            f"{' class=number' if column in table.numbers else ''}>{escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )

    body = "\n".join(f"<tr>{row(cells, 'td')}</tr>" for cells in table.rows)
    name = escape(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><caption>{name}</caption>\n'
        f"<thead><tr>{row(table.headings, 'th')}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
