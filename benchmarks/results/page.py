"""A run as one HTML page that needs no other file. Pure."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from benchmarks.results.bars import verdicts
from benchmarks.results.model import Results
from benchmarks.results.plots import Plot
from benchmarks.results.report import Table, failures, provenance_lines, summary, tables

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--soft); }
td.met { color: #009e73; font-weight: 600; }
td.missed { color: #d55e00; font-weight: 600; }
figure { margin: 1rem 0; }
img { max-width: 100%; }
figcaption, .about { color: #888; font-size: .9em; }
.scroll { overflow-x: auto; }
"""


def page(results: Results, plots: Sequence[Plot], *, title: str) -> str:
    """Tables, plots and provenance of a run."""
    shown = tables(results)
    bars = [table for table in shown if table.title == "Bars"]
    others = [table for table in shown if table.title != "Bars"]
    body = [f"<h1>{html.escape(title)}</h1>"]
    body += [_figure(plot) for plot in plots]
    body += [_table(table) for table in others]
    failed = failures(results)
    if failed:
        body.append("<h2>Not complete</h2><ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in failed) + "</ul>")
    body.append(_table(Table(title="Measured on and with", header=("", ""), rows=tuple(provenance_lines(results)))))
    body += [_table(table) for table in bars]
    if bars:
        body.append(f"<p>{html.escape(summary(verdicts(results)))}</p>")
    body.append("<p class='about'>GB are 10⁹ bytes, MiB 2²⁰. CPU seconds are those of the client processes.</p>")
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n"
        "</body></html>\n"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    heading = f"<h2>{html.escape(table.title)}</h2>"
    return f"{heading}\n<div class='scroll'><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"


def _cell(text: str) -> str:
    kind = ""
    if text.startswith("MISSED"):
        kind = " class='missed'"
    elif text.startswith(("met", "stretch met")):
        kind = " class='met'"
    return f"<td{kind}>{html.escape(text)}</td>"


def _figure(plot: Plot) -> str:
    content = base64.b64encode(plot.png).decode()
    return (
        f"<figure><img alt='{html.escape(plot.about, quote=True)}' src='data:image/png;base64,{content}'>"
        f"<figcaption>{html.escape(plot.about)}</figcaption></figure>"
    )
