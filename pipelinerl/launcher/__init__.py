"""From a validated configuration to a finished run.

`checks` lists what refuses a run that cannot work; `preflight` has its checks of model, domain and objective, of which
the last two try the user's code in a process of their own (`domain_check`, `objective_check`). `run_dir` owns the run
folder. `commands` computes how each role is started (pure). `supervisor` keeps the roles running, beside `coordination`
with the launchers of other nodes, whose leases `peers` reads (pure). `losses` decides for all of them what the loss of
a process, a node or the leader means (pure). An `engine` runs the processes: `local` on this node, with `watchdog`,
`processes` and `stopping`; `ray_engine` as actors of a Ray cluster. `reaper` cleans up when the launcher itself is
killed. `terminal` shows progress. `running` has all of them work together, and `program` comes before it. The package
imports no torch, vllm or deepspeed.
"""
