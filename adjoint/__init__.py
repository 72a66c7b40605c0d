"""Floor 1: nodes and their derivatives. Imports nothing from the other floors.

A node is a forward rule and its linearisation. Here live the linear node, implicit roots, the step protocol,
statuses, the compilation of calls, and gradient checks. Solvers and loops are handed in as functions.
"""

from ._check import check_gradient as check_gradient
from ._check import GradientReport as GradientReport
from ._compile import call_compiled as call_compiled
from ._guard import guard_tangents as guard_tangents
from ._loops import fori_loop as fori_loop
from ._loops import vary_together as vary_together
from ._loops import while_loop as while_loop
from ._node import linear_node as linear_node
from ._root import implicit_root as implicit_root
from ._status import failed as failed
from ._status import raise_if_failed as raise_if_failed
from ._status import sentence as sentence
from ._status import SolveError as SolveError
from ._status import Status as Status
from ._step import Step as Step
from ._trace import as_parameters as as_parameters
from ._trace import as_unknowns as as_unknowns
from ._trace import differentiable as differentiable
from ._trace import known_value as known_value
from ._trace import own as own
from ._trace import partition as partition
from ._trace import state_dtype as state_dtype
from ._trace import trace as trace
from ._trace import trace_unknown as trace_unknown
from ._trace import zero_tangent as zero_tangent
from ._trace import Traced as Traced
from ._tolerance import resolve_tolerance as resolve_tolerance
