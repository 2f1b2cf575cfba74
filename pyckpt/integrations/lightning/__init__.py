"""pyckpt in Lightning 2.6: saving, resuming and optimizer placement in a Trainer and in Fabric.

- `Checkpoints` is a callback that does all of it, in any strategy: one line.
- The strategies are for those who keep ``ModelCheckpoint`` and ``ckpt_path``. They are Lightning's
  own, except that checkpoints go through pyckpt. Those for Fabric are in ``.fabric``.
- `OptimizerPlacement` is for those who keep Lightning's checkpoints altogether.
- `to_lightning` writes a checkpoint as a file of Lightning's own.

Checkpoints of the callback and of the strategies have the same content: each loads the other's.
"""

from pyckpt.integrations.versions import require

require("lightning", minimum="2.6", below="2.7", extra="lightning")

from pyckpt.integrations.lightning.checkpoints import Checkpoints  # noqa: E402
from pyckpt.integrations.lightning.files import to_lightning  # noqa: E402
from pyckpt.integrations.lightning.placement import OptimizerPlacement  # noqa: E402
from pyckpt.integrations.lightning.strategies import (  # noqa: E402
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

__all__ = [
    "Checkpoints",
    "DDPStrategy",
    "FSDPStrategy",
    "ModelParallelStrategy",
    "OptimizerPlacement",
    "SingleDeviceStrategy",
    "to_lightning",
]
