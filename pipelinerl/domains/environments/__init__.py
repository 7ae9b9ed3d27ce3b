"""Role ``environment``: starts an environment server of the user's own and watches that it answers.

``__main__`` is the role. ``serve`` is its child, which makes the class of an entry of ``environments`` and calls
``launch``.
"""
