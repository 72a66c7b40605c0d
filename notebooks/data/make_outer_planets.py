"""Make `outer_planets.csv` and `outer_planets.json` from JPL's ephemeris DE421.

Needs `pip install de421 jplephem` (the extra `data`). The CSV holds positions of the barycentres of the systems of
Jupiter, Saturn, Uranus and Neptune relative to the barycentre of the Sun and the four inner planets (the Moon
included), in AU and in the axes of the ICRF, every 100 days. The JSON holds what the model takes as known: the
epoch, Pluto's state, the masses, and the averaged quadrupole of the inner planets.

Source: Folkner, Williams and Boggs, "The Planetary and Lunar Ephemeris DE 421", IPN Progress Report 42-178 (2009).
"""

import json
from pathlib import Path

import de421
import numpy as np
from jplephem import Ephemeris

HERE = Path(__file__).parent
EPOCH, SPAN, INTERVAL = 2415050.5, 54000.0, 100.0  # Julian days
OUTER = ("jupiter", "saturn", "uranus", "neptune")


def states(ephemeris: Ephemeris, names: list[str], jd: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Barycentric positions (AU) and velocities (AU/day), of shape (times, 3)."""
    found = {}
    for name in names:
        position, velocity = ephemeris.position_and_velocity(name, jd)
        found[name] = position.T / ephemeris.AU, velocity.T / ephemeris.AU
    return found


def main() -> None:
    """Write both files."""
    eph = Ephemeris(de421)
    jd = np.arange(EPOCH, EPOCH + SPAN + 1, INTERVAL)
    inner_gm = {"sun": eph.GMS, "mercury": eph.GM1, "venus": eph.GM2, "earthmoon": eph.GMB, "mars": eph.GM4}
    found = states(eph, [*inner_gm, *OUTER, "pluto"], jd)
    total = sum(inner_gm.values())
    barycentre = [sum(gm * found[n][i] for n, gm in inner_gm.items()) / total for i in (0, 1)]
    table = np.concatenate([found[n][0] - barycentre[0] for n in OUTER], axis=1)
    header = ",".join(["jd", *(f"{n}_{c}_au" for n in OUTER for c in "xyz")])
    rows = np.column_stack([jd, table])
    np.savetxt(
        HERE / "outer_planets.csv",
        rows,
        fmt=["%.1f"] + ["%.13g"] * 12,
        delimiter=",",
        header=header,
        comments="",
    )
    radii = {"mercury": 0.38709927, "venus": 0.72333566, "earthmoon": 1.00000261, "mars": 1.52371034}
    known = {
        "source": "DE421 by way of the PyPI packages de421 2008.1 and jplephem",
        "epoch_jd": EPOCH,
        "interval_days": INTERVAL,
        "gm_inner_au3_day2": total,
        "gm_outer_au3_day2": dict(zip(OUTER, [eph.GM5, eph.GM6, eph.GM7, eph.GM8], strict=True)),
        "gm_pluto_au3_day2": eph.GM9,
        "pluto_position_au": (found["pluto"][0][0] - barycentre[0][0]).tolist(),
        "pluto_velocity_au_day": (found["pluto"][1][0] - barycentre[1][0]).tolist(),
        # Semi-major axes: Standish and Williams, "Keplerian elements for approximate positions of the major planets".
        "inner_moment_au2": sum(inner_gm[n] * a**2 for n, a in radii.items()) / total,
    }
    (HERE / "outer_planets.json").write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
