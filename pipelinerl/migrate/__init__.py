"""From an experiment of ServiceNow's PipelineRL to one of this project: `python -m pipelinerl.migrate OLD.yaml`.

`migration` is pure: keys and values. The table of keys, which loading also uses, is `pipelinerl.config.renames`.
"""
