"""The distribution `alignedserve-client`: the folder `path` holds `alignedserve.client` and its dependencies.

`alignedserve-client.pth` appends that folder to `sys.path`, so that a full `alignedserve` in the same environment takes
precedence. The two distributions share no file. Importing this module is needed only where .pth files are not read
(`pip install --target`): it has the same effect.
"""

import sys
from pathlib import Path

_PATH = str(Path(__file__).parent / "path")
if _PATH not in sys.path:
    sys.path.append(_PATH)
