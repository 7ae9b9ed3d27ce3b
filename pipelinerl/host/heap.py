"""The process's heap."""

import ctypes


def return_freed_heap() -> None:
    """Give freed blocks of the heap back to the kernel, where the C library can (glibc).

    glibc keeps freed blocks of up to 32 MB for later requests, which may never fit into them.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
