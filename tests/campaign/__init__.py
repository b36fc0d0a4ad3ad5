"""Mutated inputs for every command of the command line.

Each input must end with exit code 0, or with 1 or 2 and one sentence; never with a traceback, a run of over ten
seconds without a word, text that steers the terminal, or numbers that are not finite. ``bench/campaign.py`` runs
thousands of them; tests/campaign/test_campaign.py a few, and every one that once failed (the files of ``found/``).
"""
