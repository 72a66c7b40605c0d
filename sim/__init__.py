"""Floor 3: systems, integrators and `simulate`. Imports every other floor, and is imported by none.

A simulation is a rollout of steps, each of which is a node; see `simulate`.
"""

from ._dormand_prince8 import DormandPrince8 as DormandPrince8
from ._implicit_midpoint import ImplicitMidpoint as ImplicitMidpoint
from ._inverse_cube import inverse_cube as inverse_cube
from ._kahan_li8 import KahanLi8 as KahanLi8
from ._method import AbstractMethod as AbstractMethod
from ._method import Field as Field
from ._rk4 import RK4 as RK4
from ._simulate import simulate as simulate
from ._systems import ODE as ODE
from ._systems import SecondOrder as SecondOrder
from ._trajectory import Trajectory as Trajectory
from ._velocity_verlet import VelocityVerlet as VelocityVerlet
