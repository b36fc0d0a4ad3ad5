"""`perfmodel diff`: where a prediction and a recorded step differ, operator by operator."""
