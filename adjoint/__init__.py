"""Floor 1: nodes and their derivatives. Imports nothing from the other floors.

A node is a forward rule and its linearisation. Here live the linear node, implicit roots, the step protocol,
statuses, the compilation of calls, and gradient checks. Solvers and loops are handed in as functions.
"""

from ._check import GradientReport as GradientReport
from ._check import check_gradient as check_gradient
from ._external import node as node
from ._node import linear_node as linear_node
from ._root import implicit_root as implicit_root
from ._rule_check import ArgumentCheck as ArgumentCheck
from ._rule_check import RuleReport as RuleReport
from ._status import SolveError as SolveError
from ._status import Status as Status
from ._status import failed as failed
from ._status import sentence as sentence
from ._step import Step as Step
from ._watch import SolveLog as SolveLog
from ._watch import SolveRecord as SolveRecord
from ._watch import watch_solves as watch_solves
