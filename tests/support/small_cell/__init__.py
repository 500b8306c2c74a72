"""A small cluster in virtual time, for ten thousand runs. Decisions are real; everything else is counted.

The core, the chunk schedulers and the iteration schedulers are the real ones. Messages arrive in order on each link,
after a delay. Copies and passes take time, every store counts its blocks, and tokens are only counted.
"""

from support.small_cell.cell import Shape, SmallCell
from support.small_cell.fairness import Stamps, Turns
from support.small_cell.requests import Request, Service, Wait
from support.small_cell.waits import Bound, Load

__all__ = ["Bound", "Load", "Request", "Service", "Shape", "SmallCell", "Stamps", "Turns", "Wait"]
