"""What the drawn pictures share: the colours of the report, light and dark, a title, a legend of lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib import resources

from lowtide.report.svg import HEIGHT, LEFT, WIDTH

__all__ = ["DARK", "RULES", "document", "legend_lines"]

DARK = "<style>@media(prefers-color-scheme:dark){svg{filter:invert(0.9) hue-rotate(180deg)}}</style>"
"""For a picture that is drawn in light colours: where dark is preferred, they are turned around."""

RULES = """
text{{font:13px system-ui,sans-serif;fill:{soft}}} .title{{font-size:15px;font-weight:600;fill:{ink}}}
.panel{{fill:{panel}}} .grid{{stroke:{rule}}} .boundary{{stroke:{soft};stroke-dasharray:2 3}}
.uncapped{{fill:none;stroke:{uncapped};stroke-width:1.2}} .cursor{{display:none}}
.budget{{stroke:{budget};stroke-width:1.6;stroke-dasharray:7 4}} .again{{stroke:{recomputed};stroke-width:2}}
.budget-label{{fill:{budget};font-weight:600;paint-order:stroke;stroke:{panel};stroke-width:4px}}
.band-parameters{{fill:{parameters}}} .band-inputs{{fill:{inputs}}} .band-gradients{{fill:{gradients}}}
.band-kept{{fill:{kept}}} .band-recomputed{{fill:{recomputed}}} .band-transient{{fill:{transient}}}
.found{{fill:none;stroke:{kept};stroke-width:2}} .proven{{fill:none;stroke:{budget};stroke-width:2}}
.never{{fill:{budget};fill-opacity:0.15}} .open{{fill:{kept};fill-opacity:0.12}}
"""


def legend_lines(*names: tuple[str, str]) -> Iterable[str]:
    x = LEFT
    for shade, name in names:
        yield f'<path class="{shade}" d="M{x},{HEIGHT + 28}h16"/>'
        yield f'<text x="{x + 22}" y="{HEIGHT + 32}">{name}</text>'
        x += 44 + 7 * len(name)


def document(title: str, parts: Iterable[str], rules: str = RULES) -> str:
    """A whole SVG file: colours of the report in light and dark, a title above and the parts."""
    light, dark = (rules.format(**colours) for colours in palettes())
    head, tall = 34, HEIGHT + 44
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall + head}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{light}@media(prefers-color-scheme:dark){{{dark}}}</style>\n'
        f'<rect class="panel" width="{WIDTH}" height="{tall + head}" rx="8"/>\n'
        f'<text class="title" x="16" y="26">{escape(title)}</text>\n<g transform="translate(0,{head})">\n'
        + "\n".join(filter(None, parts))
        + "\n</g>\n</svg>\n"
    )


def palettes() -> list[dict[str, str]]:
    """The colours of the report's style sheet, light and dark."""
    sheet = resources.files("lowtide.report").joinpath("page.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", sheet, flags=re.DOTALL)[:2]
    return [dict(re.findall(r"--([\w-]+): (#\w+);", block)) for block in blocks]
