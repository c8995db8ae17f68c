"""Figure 7 of the Deja Vu paper: latency of a token by prompt length, a bar a system."""

import os
from typing import Any

from dejavu_ds.bench.systems import NAMES

_COLORS = dict(zip(NAMES, ("C7", "C8", "C1", "C4", "C0", "C2"), strict=True))


def check_matplotlib() -> None:
    """ValueError without the extra."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("the plot needs matplotlib: pip install -e '.[figures]'") from error


def draw(rows: list[dict[str, Any]], path: str | os.PathLike, title: str) -> None:
    """Write a PNG: groups of bars by context, or by batch where the contexts are all one; whiskers from the 20 % to
    the 80 % quantile.

    Rows without a time are left out. Raises ValueError if none has one.
    """
    from matplotlib.figure import Figure

    timed = [row for row in rows if row["ms_median"] is not None]
    if not timed:
        raise ValueError("nothing to plot: no system gave a time")
    axis = "batch" if len({row["batch"] for row in timed}) > 1 else "context"
    groups = sorted({row[axis] for row in timed})
    # A system over packed weights has bars of its own.
    with_packing = {(row["system"], row["quantize"]) for row in timed if row["system"] in NAMES}
    systems = sorted(with_packing, key=lambda system: (NAMES.index(system[0]), system[1] or ""))
    figure = Figure(figsize=(max(6, 1.6 + 1.4 * len(groups)), 4), layout="constrained")
    ax = figure.subplots()
    width = 0.8 / len(systems)
    for i, system in enumerate(systems):
        best = [_fastest(timed, system, axis, group) for group in groups]
        found = [(x + (i - (len(systems) - 1) / 2) * width, row) for x, row in enumerate(best) if row is not None]
        places, heights = [x for x, _ in found], [row["ms_median"] for _, row in found]
        low = [row["ms_median"] - row["ms_p20"] for _, row in found]
        high = [row["ms_p80"] - row["ms_median"] for _, row in found]
        bars = ax.bar(
            places, heights, width, yerr=(low, high), label=_label(found), color=_COLORS[system[0]],
            hatch="//" if system[1] else None, error_kw={"lw": 1},
        )  # fmt: skip
        ax.bar_label(bars, fmt="{:.3g}", fontsize=7, padding=2)
    ax.set_xticks(range(len(groups)), [str(group) for group in groups])
    ax.set(xlabel="batch size" if axis == "batch" else "prompt length, tokens", ylabel="ms a step")
    ax.set_title(title, fontsize=9, wrap=True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    figure.savefig(path, dpi=150)


def _label(bars: list[tuple[float, dict[str, Any]]]) -> str:
    """The system's name, with the type of its packed weights; of the sparse one with what it keeps."""
    rows = [row for _, row in bars]
    name = ", ".join(filter(None, (rows[0]["system"], rows[0]["quantize"])))
    if rows[0]["system"] != "sparse":
        return name
    mlp, heads = (sum(row[key] for row in rows) / len(rows) for key in ("mlp_density", "head_density"))
    return f"{name}, MLP {mlp:.2f}, heads {heads:.2f}"


def _fastest(
    rows: list[dict[str, Any]], system: tuple[str, str | None], axis: str, group: int
) -> dict[str, Any] | None:
    """The row of a system and its packing in a group; of several variants the fastest."""
    found = [row for row in rows if (row["system"], row["quantize"]) == system and row[axis] == group]
    return min(found, key=lambda row: row["ms_median"], default=None)
