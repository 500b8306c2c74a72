"""A whole cell in virtual time, small enough to be run ten thousand times: the real decisions, everything else counted.

The core, the chunk schedulers and the iteration schedulers are the ones that serve. Messages arrive in order on each
link, after a delay; copies and computing take time; every store counts its blocks; tokens are only counted.
"""

from support.small_cell.cell import Shape, SmallCell
from support.small_cell.requests import Request, Service, Wait
from support.small_cell.waits import Bound, Load

__all__ = ["Bound", "Load", "Request", "Service", "Shape", "SmallCell", "Wait"]
