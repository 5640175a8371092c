"""Prefect flows: the order of the steps of a job, one flow a file, and the installed command.

What belongs here: which task follows which. What does not: anything that a task could do.
"""
