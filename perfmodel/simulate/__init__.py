"""Interpreter 1, time: host clock, device clock and messages between ranks. Interpreter 2, memory, is a subpackage."""
