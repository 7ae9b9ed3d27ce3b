import ctypes

import psutil
import pytest

from pipelinerl.world.process import return_freed_heap

BLOCK, BLOCKS = 100_000, 500


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps and returns freed blocks")
def test_freed_blocks_below_one_in_use_go_back_to_the_kernel():
    blocks = [bytearray(BLOCK) for _ in range(BLOCKS)]
    last = blocks.pop()  # keeps the end of the heap in use, so that free() alone returns nothing
    held = psutil.Process().memory_info().rss
    blocks.clear()
    return_freed_heap()
    assert held - psutil.Process().memory_info().rss > 0.8 * BLOCK * BLOCKS
    assert len(last) == BLOCK
