"""The machine below a process: durable files and folders (`disk`) and kernel settings (`process`).

Every role uses it. It imports nothing of the project.
"""
