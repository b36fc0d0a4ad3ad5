"""`perfmodel compare`: many predictions against measurements, as the accuracy card, its tables and pictures."""
