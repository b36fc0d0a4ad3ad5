"""Pipeline schedules: the order of a rank's actions, its messages, and the program that they make."""
