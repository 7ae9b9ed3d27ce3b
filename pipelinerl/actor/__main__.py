"""``python -m pipelinerl.actor --run-dir R --job actor_0``"""

from pipelinerl.actor.role import run
from pipelinerl.membership.role import RoleContext, run_role


def main(ctx: RoleContext) -> None:
    ctx.wait_for_model()
    run(ctx)


if __name__ == "__main__":
    run_role(main)
