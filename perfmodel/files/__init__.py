"""Reading and writing files: their kinds and versions, limits, validation, atomic replacement."""
