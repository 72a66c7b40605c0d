"""Drawing a schedule: what it does, and what it holds."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ._actions import Action, Advance, Store, Youturn

LEVELS = ("memory", "disk")
STORE, RESTORE = ("store in memory", "store on disk"), ("restore from memory", "restore from disk")
COLORS = ("#222222", "#3a8f3a")  # of the levels
BLUE, ORANGE = "#7fb2e5", "#e07b39"

Points = list[tuple[float, float]]


class Picture(NamedTuple):
    """Points of a drawing, (x, y) with x the number of the action; NaN separates the lines."""

    advances: np.ndarray
    youturns: np.ndarray
    stores: list[np.ndarray]  # by level
    restores: list[np.ndarray]
    live: list[np.ndarray]  # snapshots from each action to the next


def draw(schedule: Iterable[Action], axes: Any = None) -> tuple[Any, Any]:
    """Draw the steps against the actions, and below it the live snapshots; return the two Matplotlib axes.

    A snapshot is live until its slot is written over or all steps from its state on are reversed.
    """
    import matplotlib.pyplot as plt  # slow to import, and few need it

    if axes is None:
        figure, axes = plt.subplots(2, 1, sharex=True, figsize=(8, 5), height_ratios=(5, 2), layout="constrained")
        figure.align_ylabels()
    upper, lower = axes
    picture = _picture(schedule)
    _draw_steps(upper, picture)
    _draw_live(lower, picture)
    upper.set_title(repr(schedule), fontsize="medium")
    return upper, lower


def _picture(schedule: Iterable[Action]) -> Picture:
    """Replay the actions."""
    advances: Points = []
    youturns: Points = []
    stores: list[Points] = [[], []]
    restores: list[Points] = [[], []]
    live: list[Points] = [[(0, 0)], [(0, 0)]]
    slots: list[dict[int, int]] = [{}, {}]
    for x, action in enumerate(schedule):
        if isinstance(action, Advance):
            advances += [(x, action.start), (x + 1, action.stop), (np.nan, np.nan)]
        elif isinstance(action, Youturn):
            youturns += [(x, action.stop), (x + 1, action.start), (np.nan, np.nan)]
            _drop(slots, action.start)
        elif isinstance(action, Store):
            stores[action.level].append((x + 0.5, action.step))
            slots[action.level][action.slot] = action.step
        else:
            restores[action.level].append((x + 0.5, action.step))
        for level in (0, 1):
            live[level].append((x + 1, len(slots[level])))
    by_level = ([_points(level) for level in kind] for kind in (stores, restores, live))
    return Picture(_points(advances), _points(youturns), *by_level)


def _drop(slots: list[dict[int, int]], remaining: int) -> None:
    """Forget the snapshots whose steps are all reversed."""
    for level in slots:
        for slot in [slot for slot, step in level.items() if step >= remaining]:
            del level[slot]


def _points(points: Points) -> np.ndarray:
    return np.array(points, float).reshape(-1, 2).T


def _draw_steps(axes: Any, picture: Picture) -> None:
    drawn = []
    room = 500 / picture.live[0].shape[1]  # points of a figure's width for each action
    for points, label, color in ((picture.advances, "advance", BLUE), (picture.youturns, "record and reverse", ORANGE)):
        if points.size:
            width = np.clip(room, 1, 2)
            drawn += axes.plot(*points, color=color, label=label, linewidth=width, solid_capstyle="round")
    for level, (color, least) in enumerate(zip(COLORS, (1, 4), strict=True)):  # accesses of a disk are few
        size, order = np.clip(1.5 * room, least, 5), 1.5 + level  # lines are at order 2
        style = {"color": color, "linestyle": "none", "markersize": size, "markeredgewidth": 0, "zorder": order}
        for points, label, marker in ((picture.stores, STORE, "^"), (picture.restores, RESTORE, "v")):
            if points[level].size:
                drawn += axes.plot(*points[level], marker, label=label[level], **style)
    axes.set_ylabel("step")
    axes.locator_params(integer=True)
    axes.margins(x=0.01)
    for handle in axes.legend(handles=drawn, loc="upper right", frameon=False, fontsize="small").legend_handles:
        handle.set_markersize(5)


def _draw_live(axes: Any, picture: Picture) -> None:
    for level, (name, color) in enumerate(zip(LEVELS, COLORS, strict=True)):
        if level == 0 or picture.stores[level].size:
            axes.plot(*picture.live[level], color=color, label=name, drawstyle="steps-post", linewidth=1)
    axes.set_xlabel("action")
    axes.set_ylabel("live snapshots")
    axes.locator_params(integer=True)
    axes.set_ylim(0, 1.5 * max(1, *(level[1].max() for level in picture.live)))  # room for the legend
    axes.legend(loc="upper right", frameon=False, fontsize="small", ncols=2)
