"""For processes of a struck run: Python's wall clock is an hour back once the file named in the environment exists."""

import os
import time

FILE, BACK_S = os.environ.get("CLOCK_BACK_FILE"), 3600.0

if FILE is not None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - BACK_S * os.path.exists(FILE)
    time.time_ns = lambda: now_ns() - int(BACK_S * 1e9) * os.path.exists(FILE)
