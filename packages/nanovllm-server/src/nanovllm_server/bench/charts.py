"""Draws charts of results. Imports matplotlib late, because commands without --plot don't need it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150


def draw_grouped_bars(
    path: Path, title: str, unit: str, groups: Sequence[str], values_by_series: Mapping[str, Sequence[float]]
) -> None:
    """Draws groups of vertical bars. groups: names of the groups. values_by_series: per series, one value per group."""
    num_series = len(values_by_series)
    figure = _make_figure(max(5, 1.5 + 1.5 * len(groups) * num_series), 4)
    axes = figure.subplots()
    width = 0.8 / num_series
    for index, (name, values) in enumerate(values_by_series.items()):
        offset = (index - (num_series - 1) / 2) * width
        bars = axes.bar([position + offset for position in range(len(groups))], values, width, label=name)
        axes.bar_label(bars, fmt=_format_value)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.margins(y=0.1)
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=DPI)


def draw_panels_of_bars(path: Path, title: str, values_by_unit: Mapping[str, Mapping[str, float]]) -> None:
    """Draws one panel of horizontal bars per unit. values_by_unit: for each unit, the values by bar name."""
    num_bars = sum(map(len, values_by_unit.values()))
    figure = _make_figure(9, 1.5 + 0.25 * num_bars)
    panels = figure.subplots(len(values_by_unit), squeeze=False, height_ratios=[*map(len, values_by_unit.values())])
    for axes, (unit, values) in zip(panels[:, 0], values_by_unit.items(), strict=True):
        bars = axes.barh(list(values), list(values.values()))
        axes.bar_label(bars, fmt=_format_value, padding=2)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=DPI)


def draw_curves(
    path: Path,
    title: str,
    x_name: str,
    x_values: Sequence[float],
    point_labels: Sequence[str],
    lines_by_panel: Mapping[str, Mapping[str, Sequence[float]]],  # y axis label -> line name -> y values.
) -> None:
    """Draws panels of lines side by side. point_labels: texts beside the points of each panel's first line."""
    figure = _make_figure(4.5 * len(lines_by_panel), 4)
    panels = figure.subplots(1, len(lines_by_panel), squeeze=False)
    for axes, (y_name, values_by_line) in zip(panels[0], lines_by_panel.items(), strict=True):
        for line, values in values_by_line.items():
            axes.plot(x_values, values, marker="o", label=line)
        for label, x, y in zip(point_labels, x_values, next(iter(values_by_line.values())), strict=True):
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(4, 4), fontsize="x-small")
        axes.set_xlabel(x_name)
        axes.set_ylabel(y_name)
        axes.margins(x=0.15, y=0.1)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=DPI)


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _make_figure(width: float, height: float) -> "Figure":
    # pyplot would keep every figure in memory and look for a display.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
