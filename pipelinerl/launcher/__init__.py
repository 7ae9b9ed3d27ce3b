"""From a composed configuration to a finished run: `program` has a function for each way to start.

`run_plan`, `checks`, `streams_at_start` and `run_dir` work before the start. During the run `running` holds all work
together: `supervisor` keeps the roles running, `coordination` follows the launchers of other nodes, `losses` decides
what a loss means, and an engine (`local`, `ray_engine`) runs the processes. `reaper` cleans up behind a killed
launcher. The package imports no torch, vllm or deepspeed.
"""
