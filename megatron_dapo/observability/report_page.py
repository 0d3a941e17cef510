"""report.html: one file without scripts or outside resources, readable offline and by mail."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import jinja2

from megatron_dapo.observability.run_files import SAMPLES_FILE, read_samples

CONFIG_FILE = "config.resolved.yaml"
SHOWN_STEPS = 3
"""First, middle and last step whose samples are shown."""

Metrics = Mapping[int, Mapping[str, float]]

PAGE = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: #1f2933;
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
img { width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem 1.2rem .25rem 0; text-align: right; border-bottom: 1px solid #e4e7eb; }
td:first-child, th:first-child { text-align: left; }
th, .note { color: #7b8794; font-weight: normal; }
pre { background: #f5f7fa; border-radius: 6px; padding: .8rem 1rem; margin: .4rem 0 1.4rem;
      white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
.right { color: #0d9488; } .wrong { color: #c2410c; }
summary { cursor: pointer; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<img src="data:image/png;base64,{{ curve }}" alt="Curves of the run">
<h2>Samples</h2>
{% for sample in samples %}
<div>
Step {{ sample.step }} ·
{% if sample.accuracy == 1.0 %}<span class="right">right</span>
{% elif sample.accuracy == 0.0 %}<span class="wrong">wrong</span>
{% else %}<span class="note">not graded</span>{% endif %}
<span class="note">· read {{ sample.extracted }}, truth {{ sample.answer }},
reward {{ sample.reward }}, {{ sample.response_tokens }} tokens, {{ sample.finish_reason }}</span>
</div>
<pre>{{ sample.prompt }}<b>{{ sample.response }}</b></pre>
{% else %}
<p class="note">None were kept.</p>
{% endfor %}
<h2>Numbers</h2>
<table>
<tr><th>metric</th><th>first</th><th>last</th><th>least</th><th>most</th></tr>
{% for name, numbers in table %}
<tr><td>{{ name }}</td>
{% for number in numbers %}<td>{{ "%.4g" | format(number) }}</td>{% endfor %}</tr>
{% endfor %}
</table>
{% if config %}
<h2>Configuration</h2>
<details><summary>{{ config_file }}</summary><pre>{{ config }}</pre></details>
{% endif %}
</body>
</html>
"""
)


def write_page(run_dir: Path, metrics: Metrics, *, title: str, curve: Path, out: Path) -> Path:
    """Write the page of a run to `out`; all text of the run is escaped.

    Args:
        run_dir: samples and configuration are read from here, where they exist.
        metrics: step -> name -> value.
        title: heading of the page.
        curve: PNG to put inside.
        out: file to write, returned.
    """
    config = run_dir / CONFIG_FILE
    page = PAGE.render(
        title=title,
        curve=base64.b64encode(curve.read_bytes()).decode(),
        samples=_chosen_samples(run_dir / SAMPLES_FILE),
        table=_table(metrics),
        config=config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        config_file=CONFIG_FILE,
    )
    out.write_text(page, encoding="utf-8", errors="replace")
    return out


def _chosen_samples(path: Path) -> list[dict[str, object]]:
    """Samples of the first, the middle and the last step."""
    samples = read_samples(path) if path.is_file() else []
    steps = list(dict.fromkeys(sample["step"] for sample in samples))
    shown = {steps[0], steps[len(steps) // 2], steps[-1]} if steps else set()
    return [sample for sample in samples if sample["step"] in shown]


def _table(metrics: Metrics) -> list[tuple[str, tuple[float, float, float, float]]]:
    """(name, (first, last, least, most)) of every metric, by name."""
    names = sorted({name for values in metrics.values() for name in values})
    columns = {name: [v[name] for v in metrics.values() if name in v] for name in names}
    return [(name, (c[0], c[-1], min(c), max(c))) for name, c in columns.items()]
