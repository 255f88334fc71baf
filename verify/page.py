"""Pages: plain HTML that works offline and reads without colour. Nothing here knows what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --soft: #667; --line: #d8d8e0; --band: #f5f5f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #18181c; --soft: #99a; --line: #3a3a44; --band: #222228 } }
body { margin: 2.5rem auto; padding: 0 1.5rem; max-width: 110rem; color: var(--ink); background: var(--paper);
       font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.2rem; margin-top: 2.2rem }
p, li { max-width: 52rem } .soft { color: var(--soft) }
a { color: inherit }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; text-align: left }
th { border-bottom: 2px solid var(--soft); font-weight: 600 }
tbody tr:nth-child(even) { background: var(--band) }
.figure { text-align: right; white-space: nowrap }
.pass { font-weight: 600 } .fail, .wrong, .failed { font-weight: 700; text-decoration: underline wavy }
.refused, .not-here { color: var(--soft) } .refused { font-style: italic }
summary { cursor: pointer; padding: .3rem 0 } summary b { display: inline-block; min-width: 11rem }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")


def page(title: str, *sections: str) -> str:
    """A whole document of sections that are HTML already."""
    return _PAGE.substitute(title=escape(title), body="\n".join(sections))


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, css: str = "") -> str:
    return f"<p{_css(css)}>{escape(text)}</p>"


def text(plain: str) -> str:
    return escape(plain)


def link(target: str, text: str) -> str:
    return f'<a href="{escape(target)}">{escape(text)}</a>'


def items(entries: Sequence[str]) -> str:
    """A list of entries that are HTML already."""
    return "<ul>" + "".join(f"<li>{entry}</li>" for entry in entries) + "</ul>"


def details(summary: str, body: str) -> str:
    """A section that opens on a click. Both parts are HTML already."""
    return f"<details><summary>{summary}</summary>\n{body}\n</details>"


def table(
    head: Sequence[str], body: Sequence[Sequence[str]], figures: Sequence[int] = (), styles: Sequence[str] = ()
) -> str:
    """Rows of text, escaped here.

    figures  columns of numbers, set to the right
    styles   words that have a style of their own (pass, refused, …), where a cell holds nothing else
    """

    def cell(tag: str, at: int, content: str) -> str:
        css = "figure" if at in figures else content.replace(" ", "-") if content in styles else ""
        return f"<{tag}{_css(css)}>{escape(content)}</{tag}>"

    def line(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(cell(tag, at, text) for at, text in enumerate(texts)) + "</tr>"

    rows = "\n".join(line("td", texts) for texts in body)
    return f'<div class="wide"><table>\n<thead>{line("th", head)}</thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _css(name: str) -> str:
    return f' class="{escape(name)}"' if name else ""
