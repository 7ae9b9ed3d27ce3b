"""From a composed configuration to a finished run.

- `program` has a function for each way to start. `run_plan` decides what runs where. `checks` lists what refuses it.
  Those of model, domain and objective are in `preflight`, which tries the user's code in a process of its own (`trial`,
  `domain_check`, `objective_check`). `streams_at_start` decides what becomes of the streams,
  `several_nodes` which launcher leads.
- `run_dir` owns the run folder. `commands` computes how each role is started (pure).
- `running` has all work together that goes on during a run: `supervisor` keeps the roles running, beside `coordination`
  with the launchers of other nodes, whose leases `peers` reads (pure). `losses` decides for all of them what the loss
  of a process, a node or the leader means (pure). `terminal` shows progress.
- An `engine` runs the processes: `local` on this node, with `watchdog`, `processes` and `stopping`; `ray_engine` as
  actors of a Ray cluster. `reaper` cleans up when the launcher itself is killed.

The package imports no torch, vllm or deepspeed.
"""
