"""`python -m pipelinerl.preprocess --run-dir R --job preprocessor_0`."""

from pipelinerl.membership.role import RoleContext, run_role


def main(ctx: RoleContext) -> None:
    from pipelinerl.preprocess.loop import run

    ctx.wait_for_model()
    run(ctx)


if __name__ == "__main__":
    run_role(main)
