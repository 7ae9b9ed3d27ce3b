"""From a validated configuration to a finished run on this node.

`preflight` refuses a run that cannot work. `run_dir` owns the run folder. `commands` computes how each role is started
(pure). `supervisor` reacts to exits, hangs and restarts. `watchdog` finds roles that hang. `processes` starts and stops
processes. `reaper` cleans up when the launcher itself is killed. `terminal` shows progress. `program` calls all
of these in order. The package imports no torch, vllm or deepspeed.
"""
