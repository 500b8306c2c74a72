"""The distribution `alignedserve-client`: `alignedserve.client` and what it needs, in the folder `path` beside this.

Nobody has to import this. `alignedserve-client.pth` puts that folder at the end of `sys.path`, so that a whole
`alignedserve` in the same environment goes before it, and neither has a file of the other's. Where .pth files are not
read (`pip install --target`), importing this does the same.
"""

import sys
from pathlib import Path

_PATH = str(Path(__file__).parent / "path")
if _PATH not in sys.path:
    sys.path.append(_PATH)
