"""The look of every picture, and the one place where they are saved. matplotlib is imported only to draw something."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import PICTURE, SOFTWARE
from perfmodel.files.writing import check_writable, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = {
    "font.size": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 15,
    "figure.titlesize": 14,
    "figure.titleweight": "bold",
}
DOTS_PER_INCH = 120
LETTERS_AN_INCH = 8.4  # of a figure's title
FROM_ZERO = 0.5  # lowest value over highest, below which an axis begins at 0
FORMATS = {".png": {"Software": SOFTWARE}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}  # metadata


def file_words(text: str) -> str:
    """Write text as words of a file's name.

    >>> file_words("gpt-1.3b (node 1)")
    'gpt-1.3b-node-1'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")


def wrapped(title: str, letters: float) -> str:
    """Lines of no more than so many letters.

    >>> wrapped("a pipeline\\nof stages that work", 12)
    'a pipeline\\nof stages\\nthat work'
    """
    return "\n".join(part for line in title.splitlines() for part in wrap(line, int(letters), break_on_hyphens=False))


def axes_or_new(ax: Axes | None) -> Axes:
    """``ax``, or the Axes of a new figure that no window manager knows of."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    return Figure(layout="constrained").subplots()


def legend_below(ax: Axes, colours: Mapping[str, str]) -> None:
    """Draw a legend below the axes and the label of their x axis; ``colours`` are by their meanings."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
    if patches:
        where = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 4, "frameon": False}
        ax.legend(handles=patches, **where)


def spread_limits(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis on which the differences of dots can be seen: from 0 only where that takes less than half of it.

    >>> spread_limits([100.0, 110.0])
    (96.5, 113.5)
    >>> spread_limits([3.0, 10.0])
    (0.0, 11.5)
    """
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low < FROM_ZERO * high:
        return 0.0, 1.15 * high
    room = 0.35 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def check_picture(path: Path) -> None:
    """Refuse now what :func:`save_figure` would refuse when the picture is drawn.

    Raises
    ------
    PerfModelError
        If the name does not end in one of :data:`FORMATS`, or no picture can be written there.
    """
    _ending(path)
    check_writable(path, PICTURE)


def _ending(path: Path) -> str:
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise PerfModelError(f"{path}: a plot must end in {', '.join(FORMATS)} (got {ending!r}). Choose one of them.")
    return ending


def save_figure(
    path: Path,
    title: str,
    size_inch: tuple[float, float],
    draw: Sequence[Callable[[Axes], Axes]],
    side_by_side: bool = False,
) -> Path:
    """Draw each of ``draw`` on Axes of its own, below each other or side by side, and write the picture.

    A title that is wider than the picture is broken into lines.

    Raises
    ------
    PerfModelError
        If the name of the file does not end in one of :data:`FORMATS`, or the existing file is no picture of
        perfmodel's.
    """
    ending = _ending(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size_inch, layout="constrained")
        rows, columns = (1, len(draw)) if side_by_side else (len(draw), 1)
        for draw_on, ax in zip(draw, figure.subplots(rows, columns, squeeze=False).flat, strict=True):
            draw_on(ax)
        figure.suptitle(wrapped(title, LETTERS_AN_INCH * size_inch[0]))
        content = io.BytesIO()
        figure.savefig(content, format=ending[1:], dpi=DOTS_PER_INCH, metadata=FORMATS[ending])
    write_atomically(path, with_palette(content.getvalue()) if ending == ".png" else content.getvalue(), PICTURE)
    return path


def with_palette(png: bytes) -> bytes:
    """Return the picture with its texts in at most 256 colours: a third of the bytes, and no visible difference."""
    from PIL import Image, PngImagePlugin

    content, texts = io.BytesIO(), PngImagePlugin.PngInfo()
    with Image.open(io.BytesIO(png)) as picture:
        flat = picture.convert("RGB").quantize(dither=Image.Dither.NONE)
        for key, text in picture.info.items():
            if isinstance(key, str) and isinstance(text, str):
                texts.add_text(key, text)
    flat.save(content, "PNG", optimize=True, pnginfo=texts)
    return content.getvalue()
