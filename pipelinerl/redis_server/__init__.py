"""The redis server of a run, where streams=redis: the role (`__main__`), and starting and stopping one (`server`)."""
