"""What one thing costs on a profile's machine: a kernel, a collective, a transfer, a host call; and what slows it."""
