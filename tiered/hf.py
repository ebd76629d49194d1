"""The module that ``import tiered.hf`` finds: ``tiered.interop.hugging_face`` itself."""

import sys

from tiered.interop import hugging_face

__all__ = ["hugging_face"]

sys.modules[__name__] = hugging_face
