"""The classical fourth-order Runge-Kutta method."""

from typing import ClassVar

from ._runge_kutta import AbstractRungeKutta, Tableau


class RK4(AbstractRungeKutta):
    """The classical Runge-Kutta method of order 4, four stages: the plain choice for smooth, non-stiff equations.

    Stable for h |λ| below about 2.8 on the imaginary and the negative real axis. It does not preserve energy over
    long times; see `KahanLi8`.

    Source: Hairer, Nørsett and Wanner, *Solving Ordinary Differential Equations I*, Table 1.2 (left),
    doi:10.1007/978-3-540-78862-1.
    """

    order: ClassVar[int] = 4
    stages: ClassVar[int] = 4
    tableau: ClassVar[Tableau] = Tableau(
        a=((), (1 / 2,), (0, 1 / 2), (0, 0, 1)),
        b=(1 / 6, 1 / 3, 1 / 3, 1 / 6),
        c=(0, 1 / 2, 1 / 2, 1),
    )
