"""From a validated configuration to a finished run on this node.

`preflight` refuses what cannot work, `run_dir` owns the run folder, `commands` says how each role is started (pure),
`supervisor` decides and acts on ends, hangs and restarts, `health` says who hangs (pure), `processes` starts, stops and
sweeps, `reaper` cleans up when the launcher itself is killed, `terminal` shows progress, `program` puts all in order.
Imports no torch, vllm or deepspeed.
"""
