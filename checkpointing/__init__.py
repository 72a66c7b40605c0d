"""Floor 2: schedules and the loops that run by them. Imports `adjoint` only.

Schedules are plain integers that move no data; loops run them in bounded memory.
"""

from ._budget import Budget as Budget
from ._disk import Disk as Disk
from ._plan import Plan as Plan
from ._plan import plan as plan
from ._scan import scan as scan
from ._snapshot_files import SnapshotError as SnapshotError
from ._while_loop import while_loop as while_loop
from .schedules import Action as Action
from .schedules import Advance as Advance
from .schedules import Restore as Restore
from .schedules import Schedule as Schedule
from .schedules import Store as Store
from .schedules import Youturn as Youturn
from .schedules import binomial as binomial
from .schedules import multistage as multistage
from .schedules import online as online
from .schedules import store_all as store_all
