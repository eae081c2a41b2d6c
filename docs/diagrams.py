"""Draws the pictures of docs/start/concepts.md from the real geometry: ``python docs/diagrams.py``."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from zero_shard.layout import lay_out

_IMAGES = Path(__file__).parent / "img"
_KINDS = {"weights": "#3b76c4", "gradients": "#e8833a", "moments": "#4a9e5c"}
_RANKS = ("#3b76c4", "#e8833a", "#4a9e5c", "#9467bd")
_INK, _FAINT, _GRID = "#24303c", "#7a8794", "#d5dbe1"
_NUM_RANKS = 4


class Picture:
    """An SVG on a white card, so that it can be read on a dark page, too."""

    def __init__(self, width: float, height: float, title: str) -> None:
        font = "font-family='system-ui, sans-serif' font-size='13'"
        self.parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' role='img' {font}>",
            f"<title>{escape(title)}</title>",
            f"<rect width='{width:g}' height='{height:g}' rx='10' fill='#ffffff'/>",
        ]

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, *, edge: str = "none", is_dashed: bool = False
    ) -> None:
        """Draw a rectangle."""
        dashes = " stroke-dasharray='3 3'" if is_dashed else ""
        at = f"x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}'"
        self.parts.append(f"<rect {at} rx='2' fill='{fill}' stroke='{edge}'{dashes}/>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "middle",
        fill: str = _INK,
        size: int = 13,
        bold: bool = False,
    ) -> None:
        """Write words."""
        weight = " font-weight='600'" if bold else ""
        style = f"text-anchor='{anchor}' fill='{fill}' font-size='{size}'{weight}"
        self.parts.append(f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>")

    def line(self, x: float, y: float, to_x: float, to_y: float, color: str, *, width: float = 1.2) -> None:
        """Draw a straight line."""
        ends = f"x1='{x:.1f}' y1='{y:.1f}' x2='{to_x:.1f}' y2='{to_y:.1f}'"
        self.parts.append(f"<line {ends} stroke='{color}' stroke-width='{width:g}'/>")

    def arrow(self, x: float, y: float, to_y: float, color: str = _FAINT) -> None:
        """Draw an arrow that points down."""
        self.line(x, y, x, to_y - 5, color)
        self.parts.append(
            f"<path d='M{x - 4:.1f} {to_y - 6:.1f} L{x + 4:.1f} {to_y - 6:.1f} L{x:.1f} {to_y:.1f} Z' fill='{color}'/>"
        )

    def legend(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Name colors in a row."""
        for name, color in entries.items():
            self.box(x, y - 10, 12, 12, color)
            self.text(x + 18, y, name, anchor="start")
            x += 44 + 7.4 * len(name)

    def svg(self) -> str:
        """Return the whole."""
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def stages() -> Picture:
    """What each of four ranks holds at each stage: heights are bytes per float32 parameter."""
    picture = Picture(880, 330, "What each rank holds at stages 0 to 3")
    names = ("0: replicated", "1: optimizer state", "2: + gradients", "3: + parameters")
    heights, scale, foot = {"weights": 4, "gradients": 4, "moments": 8}, 11.5, 262
    sharded = [set(), {"moments"}, {"moments", "gradients"}, {"moments", "gradients", "weights"}]
    for stage, name in enumerate(names):
        left = 24 + 214 * stage
        total = sum(height / (_NUM_RANKS if kind in sharded[stage] else 1) for kind, height in heights.items())
        picture.text(left + 92, 34, f"stage {name}", bold=True)
        picture.text(left + 92, 54, f"{total:g} of 16 bytes per parameter", fill=_FAINT, size=12)
        for rank in range(_NUM_RANKS):
            bottom = foot
            for kind, height in heights.items():
                whole = height * scale
                part = whole / _NUM_RANKS if kind in sharded[stage] else whole
                x = left + 46 * rank
                picture.box(x, bottom - whole, 40, whole, "#f6f8fa", edge=_GRID, is_dashed=True)
                lower = part * rank if kind in sharded[stage] else 0
                picture.box(x, bottom - lower - part, 40, part, _KINDS[kind])
                bottom -= whole + 3
            picture.text(left + 46 * rank + 20, foot + 18, f"rank {rank}", fill=_FAINT, size=11)
    picture.legend(225, 310, {**_KINDS, "on other ranks": _GRID})
    return picture


def bucket() -> Picture:
    """Slots, padding and shards of a real bucket: the parameters of a small block, last one first."""
    numels = {
        "down.bias": 24,
        "down.weight": 24 * 40,
        "up.bias": 40,
        "up.weight": 40 * 24,
        "norm.bias": 24,
        "norm.weight": 24,
    }
    layout = lay_out(numels.values(), _NUM_RANKS)
    picture = Picture(880, 300, "A bucket: slots, padding and shards")
    left, width = 30, 820
    scale = width / layout.numel
    picture.text(left, 32, "parameters, in the order in which backward reaches them", anchor="start", bold=True)
    for (name, numel), slot in zip(numels.items(), layout.slots, strict=True):
        x = left + slot.offset * scale
        picture.box(x, 62, max(numel * scale, 2), 44, "#dfe8f5", edge="#8aa6cf")
        if numel * scale > 60:
            picture.text(x + numel * scale / 2, 89, f"{name}  {numel}", size=12)
        else:
            at = {"down.bias": x + 20, "norm.bias": x - 54}.get(name, x + 2)
            picture.text(at, 54, name, size=10, fill=_FAINT)
    end = layout.slots[-1].offset + layout.slots[-1].numel
    picture.box(left + end * scale, 62, (layout.numel - end) * scale, 44, "#f6f8fa", edge=_GRID, is_dashed=True)
    picture.text(
        left,
        138,
        f"one flat buffer of {layout.numel} elements, cut into {_NUM_RANKS} equal ranges",
        anchor="start",
        bold=True,
    )
    for rank in range(_NUM_RANKS):
        start, stop = layout.shard_range(rank)
        x, size = left + start * scale, (stop - start) * scale
        picture.box(x + 1, 152, size - 2, 44, _RANKS[rank])
        picture.text(x + size / 2, 179, f"rank {rank} owns {start} to {stop}", fill="#ffffff", bold=True)
        for part in layout.segments(rank):
            picture.box(
                left + (start + part.shard_start) * scale, 204, max(part.numel * scale - 1.5, 1.5), 8, _RANKS[rank]
            )
            if part.numel * scale > 60:
                words = f"{list(numels)[part.slot]}[{part.param_start}:{part.param_start + part.numel}]"
                picture.text(
                    left + (start + part.shard_start + part.numel / 2) * scale, 228, words, size=11, fill=_FAINT
                )
    picture.text(
        left,
        262,
        "Moments exist for the own range only (stage 1), gradients too (2), parameters too (3). Slots begin at",
        anchor="start",
        fill=_FAINT,
        size=12,
    )
    picture.text(
        left,
        280,
        "multiples of 16 elements; the all-gather fills the buffer in place, each rank's input being its own range.",
        anchor="start",
        fill=_FAINT,
        size=12,
    )
    return picture


def exchange() -> Picture:
    """How gradients of a bucket become the mean on the rank that owns a range."""
    picture = Picture(880, 340, "Reduction of a bucket: slices, exchange, sum in rank order")
    picture.text(30, 30, "each rank flattens its own gradients of a bucket into slices", anchor="start", bold=True)
    width, tops = 190, (62, 210)
    for rank in range(_NUM_RANKS):
        left = 30 + 212 * rank
        for part in range(_NUM_RANKS):
            x = left + part * width / _NUM_RANKS
            picture.box(x, tops[0], width / _NUM_RANKS - 2, 30, _RANKS[part])
            picture.text(x + width / 8 - 1, tops[0] + 20, f"{part}", fill="#ffffff")
            to_x = 30 + 212 * part + (rank + 0.5) * width / _NUM_RANKS
            picture.line(
                x + width / 8, tops[0] + 32, to_x, tops[1] - 12, _RANKS[part], width=2.6 if rank == part else 1.6
            )
        picture.text(left + width / 2, tops[0] - 10, f"rank {rank}", fill=_FAINT, size=12)
    for rank in range(_NUM_RANKS):
        left = 30 + 212 * rank
        for source in range(_NUM_RANKS):
            x = left + source * width / _NUM_RANKS
            picture.box(x, tops[1] - 10, width / _NUM_RANKS - 2, 30, "#ffffff", edge=_RANKS[rank])
            picture.text(x + width / 8 - 1, tops[1] + 10, f"of {source}", size=12, fill=_RANKS[rank])
        picture.arrow(left + width / 2, tops[1] + 26, tops[1] + 54)
        picture.box(left, tops[1] + 56, width - 2, 32, _RANKS[rank])
        picture.text(left + width / 2, tops[1] + 77, f"mean of range {rank}, float32", fill="#ffffff", bold=True)
    picture.text(
        30,
        318,
        "One kernel adds the slices in rank order in float32, divides, and leaves the sum of squares for the norm.",
        anchor="start",
        fill=_FAINT,
        size=12,
    )
    return picture


def timeline() -> Picture:
    """A stage-3 pass through three units with one unit of prefetch."""
    picture = Picture(880, 300, "A step at stage 3: gathers and reductions beside the computation")
    left, unit, lanes = 130, 62, {"gathers": 60, "computes": 110, "reduces": 160, "holds whole": 216}
    for name, y in lanes.items():
        picture.text(left - 14, y + 21, name, anchor="end", bold=True)
    gathers = ((0, "0"), (1, "1"), (2, "2"), (4, "2"), (5, "1"), (6.5, "0"))
    computes = (
        *((number + 1, 1, f"forward {number}", "weights") for number in range(3)),
        *((5 + 1.5 * (2 - number), 1.5, f"backward {number}", "weights") for number in (2, 1, 0)),
        (10.5, 1, "step", "moments"),
    )
    blocks = [("gathers", at, 1, f"unit {name}", "#9467bd") for at, name in gathers]
    blocks += [("computes", at, length, words, _KINDS[kind]) for at, length, words, kind in computes]
    blocks += [("reduces", 6.5 + 1.5 * (2 - n), 1, f"unit {n}", _KINDS["gradients"]) for n in (2, 1, 0)]
    for lane, at, length, words, fill in blocks:
        picture.box(left + at * unit, lanes[lane], length * unit - 3, 32, fill)
        picture.text(left + (at + length / 2) * unit - 1, lanes[lane] + 21, words, fill="#ffffff", size=11)
    spans = ((0, 2, "0"), (1, 3, "1"), (2, 4, "2"), (4, 6.5, "2"), (5, 8, "1"), (6.5, 9.5, "0"))
    for start, stop, words in spans:
        y = lanes["holds whole"] + 22 * (words == "1")
        picture.box(left + start * unit, y, (stop - start) * unit - 3, 18, "#eadff3", edge="#9467bd")
        picture.text(left + (start + stop) / 2 * unit, y + 13, f"unit {words}", size=11)
    picture.text(left, 36, "forward", anchor="start", fill=_FAINT)
    picture.text(left + 4 * unit + 4, 36, "backward", anchor="start", fill=_FAINT)
    picture.line(left + 4 * unit - 2, 24, left + 4 * unit - 2, 264, _GRID)
    words = (
        "A unit is released after its forward and after its backward; with prefetch = 1 never more than two are whole."
    )
    picture.text(left, 286, words, anchor="start", fill=_FAINT, size=12)
    return picture


PICTURES = {"stages": stages, "bucket": bucket, "exchange": exchange, "timeline": timeline}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (_IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
