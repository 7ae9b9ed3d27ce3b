"""`python -m pipelinerl.launcher.render.finish RUN`: writes the report of a run whose roles a platform started.

Exit code 0: all steps were made. 143: the roles were stopped before that.
"""

import sys
from pathlib import Path

from pipelinerl.config.load import load_run
from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.report import read_metrics_tail, summary_lines, write_report
from pipelinerl.observability.catalogue import STEP
from pipelinerl.streams import backend_from_config

EXIT_STOPPED = 143


def main() -> int:
    run_dir = Path(sys.argv[1]).resolve()
    cfg = load_run(run_dir)
    backend_from_config(cfg, run_dir)
    step, steps = int((read_metrics_tail(run_dir, "finetune") or {}).get(STEP, 0)), cfg.finetune.max_train_steps
    if step < steps:
        print(f"stopped after step {step} of {steps}: a job that is queued again resumes {run_dir}")
        return EXIT_STOPPED
    started = (run_dir / RUN_CONFIG).stat().st_mtime
    summary = write_report(run_dir, cfg, launched=started, started=started)
    for line in summary_lines(summary, run_dir):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(told_in_one_line(main))
