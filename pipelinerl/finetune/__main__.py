"""`python -m pipelinerl.finetune --run-dir R --job finetune_0`: one rank of the trainer."""

from pipelinerl.membership.role import RoleContext, importing, run_role


def main(ctx: RoleContext) -> None:
    from pipelinerl.config.private_names import require_private_names

    with importing():
        require_private_names("trainer")
        from pipelinerl.finetune.loop import run

    ctx.wait_for_model()
    run(ctx)


if __name__ == "__main__":
    run_role(main)
