"""Documents with which a platform runs an experiment: `python -m pipelinerl.render --target slurm|jobset|skypilot`.

Pure: from a `Deployment` to text. No document holds a secret.
"""
