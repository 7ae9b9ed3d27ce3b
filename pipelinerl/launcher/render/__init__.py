"""Documents with which a platform runs an experiment: `python -m pipelinerl.render --target slurm|jobset`.

Pure functions from a `Deployment` to text. No document contains a secret.
"""
