"""`python -m pipelinerl.inference --run-dir R --job actor_llm_0`: one vLLM server, or one node's part of one."""

import os

import msgspec

from pipelinerl.membership.role import RoleContext, importing, run_role


def main(context: RoleContext) -> None:
    """Pin the process to its cores, set vLLM's environment, then import and serve."""
    from pipelinerl.config.paths import weight_store
    from pipelinerl.config.private_names import require_private_names
    from pipelinerl.inference.args import (
        averaging,
        first_rollouts,
        profiling,
        score_temperature,
        vllm_arguments,
        vllm_environment,
    )
    from pipelinerl.world.cluster import gpu_memory_bytes
    from pipelinerl.world.disk import plain_path
    from pipelinerl.world.tls import server_files

    os.environ.update(vllm_environment(context.cfg, context.world, context.job, os.environ))
    if context.job.cores:
        os.sched_setaffinity(0, context.job.cores)
    with importing():
        require_private_names("server")
        from pipelinerl.inference.answers import require_sampling_parameters
        from pipelinerl.inference.part import serve_part
        from pipelinerl.inference.server import Service, serve

    for section in ("llm", "test_llm"):
        require_sampling_parameters(section, getattr(context.cfg, section).parameters)
    context.wait_for_model()
    if context.stop.is_set():
        return
    gpu_bytes = min(gpu_memory_bytes(), default=0)
    job = msgspec.structs.replace(context.job, kind=context.job.kind.removesuffix("_part"))
    arguments = vllm_arguments(context.cfg, context.world, job, gpu_bytes)
    arguments = tuple(map(plain_path, arguments + profiling(context.cfg, job, context.run_dir)))
    if job.span is not None and job.span.has_workers_only:
        serve_part(arguments, job.span, context)
        return
    if tls := server_files(context.cfg.world, context.job.hostname):
        arguments += ("--ssl-certfile", tls[0], "--ssl-keyfile", tls[1])
    is_policy = context.job.kind == "actor_llm"
    weights = context.cfg.weights
    service = Service(
        vllm=context.cfg.vllm_config,
        weights=weights,
        store=weight_store(weights.store, context.run_dir) if is_policy and weights.backend == "store" else None,
        score_temperature=score_temperature(context.cfg, job),
        averaging=averaging(context.cfg, job, context.run_dir),
        first_rollouts=first_rollouts(context.cfg, job.num_ranks, gpu_bytes) if is_policy else None,
        span=job.span,
    )
    serve(arguments, service=service, status=context.status, stop=context.stop, membership=context.membership)


if __name__ == "__main__":
    run_role(main)
