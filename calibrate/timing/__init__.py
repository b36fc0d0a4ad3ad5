"""Stopwatches of device and host, and when enough samples have been taken."""
