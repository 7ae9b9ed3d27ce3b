"""Role ``environment``: starts an environment server of the user's and watches that it answers.

``__main__`` is the role. Its child, ``serve``, makes the class of an entry of ``environments`` and calls ``launch``.
"""
