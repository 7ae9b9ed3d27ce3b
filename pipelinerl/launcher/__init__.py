"""From a validated configuration to a finished run.

`preflight` refuses a run that cannot work. `run_dir` owns the run folder. `commands` computes how each role is started
(pure). `supervisor` decides about exits and restarts. An `engine` runs the processes: `local` on this node, with
`watchdog`, `processes` and `stopping`; `ray_engine` as actors of a Ray cluster. `reaper` cleans up when the launcher
itself is killed. `terminal` shows progress. `running` has all of them work together, and `program` comes before it. The
package imports no torch, vllm or deepspeed.
"""
