"""The real thing: scenarios run on this machine, and what they took written down as measurements."""
