"""What is simulated: systems of equations of motion."""

from collections.abc import Callable
from typing import Any

import equinox as eqx


class ODE(eqx.Module):
    """A first-order system  y' = f(t, y, params).

    The default: choose `SecondOrder` instead where positions and velocities are known apart, since symplectic
    methods need to know which is which. A plain function given to `simulate` is an `ODE`.

    Parameters
    ----------
    rate
        `rate(t, y, params)`, of the structure and shapes of `y`; t in the time unit of `t0` and `t1`, the result in
        units of y per unit of time. It must be smooth where gradients are wanted.
    """

    rate: Callable[[Any, Any, Any], Any]


class SecondOrder(eqx.Module):
    """A second-order system  q'' = a(t, q, v, params),  v = q', with state y = (q, v).

    Choose it for mechanics. Symplectic methods (`VelocityVerlet`, `KahanLi8`) need an acceleration that does not
    depend on v and refuse one that does; Runge-Kutta methods take any.

    Parameters
    ----------
    acceleration
        `acceleration(t, q, v, params)`, of the structure and shapes of `q`, in units of q per time squared.
    """

    acceleration: Callable[[Any, Any, Any, Any], Any]
