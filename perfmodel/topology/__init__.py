"""`perfmodel topology`: links between devices, from nvidia-smi or a file, as text and as a picture."""
