"""Configuration: read once, validated before anything starts, unknown keys refused, then frozen.

``sections`` mirrors ``conf/`` in types and bounds, ``rules`` holds constraints across sections as named functions,
``load`` turns a Hydra ``DictConfig`` or a run folder into a ``Config``.
"""
