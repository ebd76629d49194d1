"""An arena and a buffer, checked for leaks, as the tests of bytes have them."""

from tests.bytes.conftest import arena, buffer

__all__ = ["arena", "buffer"]
