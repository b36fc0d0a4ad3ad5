"""Pictures take no more bytes than they need."""

from __future__ import annotations

import io

from PIL import Image

from perfmodel.report.plots.canvas import with_palette


def test_a_palette_keeps_size_and_colours() -> None:
    picture = Image.new("RGBA", (300, 200), "#4477AA")
    picture.paste("#EE6677", (0, 0, 150, 200))
    content = io.BytesIO()
    picture.save(content, "PNG", compress_level=0)
    smaller = with_palette(content.getvalue())
    assert len(smaller) < len(content.getvalue()) / 10
    with Image.open(io.BytesIO(smaller)) as found:
        assert (found.mode, found.size) == ("P", (300, 200))
        flat = found.convert("RGB")
        assert [flat.getpixel(at) for at in ((10, 10), (290, 190))] == [(0xEE, 0x66, 0x77), (0x44, 0x77, 0xAA)]
    assert with_palette(content.getvalue()) == smaller
