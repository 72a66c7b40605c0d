"""Floor 2: linear and nonlinear solvers, each a node. Imports `adjoint` only.

Methods carry their tolerances: `CG(rtol=1e-10)`, `Newton(rtol=1e-12, linear=LU())`. A failed solve is a status
with a sentence, and by default an exception; its gradient is an error, never a number.
"""

from ._amg import amg as amg
from ._anderson import Anderson as Anderson
from ._banded import Banded as Banded
from ._bicgstab import BiCGStab as BiCGStab
from ._cg import CG as CG
from ._chandrupatla import Chandrupatla as Chandrupatla
from ._cholesky import Cholesky as Cholesky
from ._factors import FactorStatistics as FactorStatistics
from ._factors import clear_factors as clear_factors
from ._factors import factor_statistics as factor_statistics
from ._factors import limit_factors as limit_factors
from ._fixed_point import fixed_point as fixed_point
from ._gauss_newton import GaussNewton as GaussNewton
from ._gmres import GMRES as GMRES
from ._ilu import ilu as ilu
from ._jacobi import jacobi as jacobi
from ._lbfgs import LBFGS as LBFGS
from ._least_squares import least_squares as least_squares
from ._levenberg_marquardt import LevenbergMarquardt as LevenbergMarquardt
from ._linear_solve import linear_solve as linear_solve
from ._lu import LU as LU
from ._method import AbstractLinearMethod as AbstractLinearMethod
from ._method import AbstractRootMethod as AbstractRootMethod
from ._minimize import minimize as minimize
from ._minres import MINRES as MINRES
from ._multigrid import multigrid as multigrid
from ._newton import Newton as Newton
from ._newton_cg import NewtonCG as NewtonCG
from ._newton_krylov import NewtonKrylov as NewtonKrylov
from ._picard import Picard as Picard
from ._preconditioner import AbstractPreconditioner as AbstractPreconditioner
from ._preconditioner import preconditioner as preconditioner
from ._root_find import root_find as root_find
from ._solution import Solution as Solution
from ._sparse_lu import SparseLU as SparseLU
from ._tridiagonal import Tridiagonal as Tridiagonal
from ._trust_region import TrustRegion as TrustRegion
