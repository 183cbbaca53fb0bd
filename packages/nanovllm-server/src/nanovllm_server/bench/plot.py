"""Draws results as pictures. Imports matplotlib only when it draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


def bars(path: Path, title: str, unit: str, cases: Sequence[str], series: dict[str, list[float]]) -> None:
    """Draws a group of bars for each case, with one bar per series."""
    figure = _figure(max(5, 1.5 + 1.5 * len(cases) * len(series)), 4)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        drawn = axes.bar([position + offset for position in range(len(cases))], values, width, label=name)
        axes.bar_label(drawn, fmt=_shown)
    axes.set_xticks(range(len(cases)), cases)
    axes.set_ylabel(unit)
    axes.margins(y=0.1)
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=DPI)


def ladder(path: Path, title: str, panels: dict[str, dict[str, float]]) -> None:
    """Draws horizontal bars by name, in one panel per unit."""
    count = sum(map(len, panels.values()))
    figure = _figure(9, 1.5 + 0.25 * count)
    rows = figure.subplots(len(panels), squeeze=False, height_ratios=[len(rates) for rates in panels.values()])
    for axes, (unit, rates) in zip(rows[:, 0], panels.items(), strict=True):
        drawn = axes.barh(list(rates), list(rates.values()))
        axes.bar_label(drawn, fmt=_shown, padding=2)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=DPI)


def curves(
    path: Path, title: str, x: tuple[str, list[float]], labels: Sequence[str], panels: dict[str, dict[str, list[float]]]
) -> None:
    """Draws panels side by side, each with lines over the same x. labels: names of the points."""
    figure = _figure(4.5 * len(panels), 4)
    columns = figure.subplots(1, len(panels), squeeze=False)
    for axes, (name, lines) in zip(columns[0], panels.items(), strict=True):
        for line, values in lines.items():
            axes.plot(x[1], values, marker="o", label=line)
        for label, horizontal, vertical in zip(labels, x[1], next(iter(lines.values())), strict=True):
            axes.annotate(label, (horizontal, vertical), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
        axes.set_xlabel(x[0])
        axes.set_ylabel(name)
        axes.margins(x=0.15, y=0.1)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=DPI)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figure(width: float, height: float) -> "Figure":
    # pyplot would keep every figure in memory and look for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
