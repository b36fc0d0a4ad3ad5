"""Formulas of step time, memory and communication for a scenario, symbol by symbol, to hold the simulator against."""
