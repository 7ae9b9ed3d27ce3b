"""From an experiment of ServiceNow's PipelineRL to one of this project: `pipelinerl migrate OLD.yaml`.

`migration` is pure: keys and values. The table of keys, which loading also uses, is `pipelinerl.config.renames`.
"""
