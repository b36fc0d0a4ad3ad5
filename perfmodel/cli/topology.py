"""The command ``perfmodel topology``."""

from __future__ import annotations

from pathlib import Path

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import FILE, wrote
from perfmodel.terminal import write


@click.command(cls=TaughtCommand)
@click.argument("source", metavar="[FILE]", required=False)
@click.option("--plot", type=FILE, metavar="FILE", help="Draw it there: .png, .svg or .pdf.")
@click.option("--groups", "layout", metavar="NAME=SIZE,...", help="List groups of ranks, innermost first: tp=4,dp=2.")
@click.option("--gpu", metavar="NAME", help="Whose datasheet gives the rates of links where FILE names no GPU: H200.")
def topology(source: str | None, plot: Path | None, layout: str | None, gpu: str | None) -> None:
    """Print what joins the GPUs: best ways, ring and groups.

    FILE: a saved `nvidia-smi topo -m`, a profile (file or catalog name), or a description such as
    2x8:nvswitch=450GB/s,network=8x50GB/s; this machine if left out.
    """
    from perfmodel.topology.paths import parse_layout
    from perfmodel.topology.sources import find_topology
    from perfmodel.topology.text import topology_text

    if plot is not None:
        from perfmodel.report.plots.canvas import check_picture

        check_picture(plot)
    graph = find_topology(source, gpu)
    text = topology_text(graph, None if layout is None else parse_layout(layout))
    if plot is not None:
        from perfmodel.topology.plot import save_topology_plot

        wrote([save_topology_plot(graph, plot)])
    write(text)
