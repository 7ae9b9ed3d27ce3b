"""Environment variables of a run's processes, set by the launcher. Imports nothing: every role may read them."""

SECRET_VARIABLE = "PIPELINERL_SECRET"
"""Bearer token of the control endpoints; several launchers get it from outside, the same on all nodes."""
REDIS_PASSWORD_VARIABLE = "PIPELINERL_REDIS_PASSWORD"
RUN_VARIABLE = "PIPELINERL_RUN"
"""A random mark of all processes of a launch."""
ROLE_VARIABLE = "PIPELINERL_ROLE"
"""`<that mark>/<job>`, inherited by all that a role starts."""
SECRET_VARIABLES = (SECRET_VARIABLE, REDIS_PASSWORD_VARIABLE)
