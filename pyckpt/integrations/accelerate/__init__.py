"""An Accelerator whose ``save_state`` and ``load_state`` go through pyckpt. ::

from pyckpt.integrations.accelerate import Accelerator  # in place of accelerate's own
"""

from pyckpt.integrations.versions import require

require("accelerate", minimum="1.15", below="2", extra="accelerate")

from pyckpt.integrations.accelerate.accelerator import Accelerator  # noqa: E402

__all__ = ["Accelerator"]
