"""Floor 2: schedules and the loops that run by them. Imports `adjoint` only.

Schedules are plain integers that move no data; loops run them in bounded memory.
"""

from ._actions import Action as Action
from ._actions import Advance as Advance
from ._actions import Restore as Restore
from ._actions import Store as Store
from ._actions import Youturn as Youturn
from ._binomial import binomial as binomial
from ._scan import scan as scan
