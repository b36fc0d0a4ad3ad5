"""The hardware profile and everything in it, the measurement of a real run, datasheets and imports of other tools."""
