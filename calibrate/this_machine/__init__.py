"""What machine this is, and how processes are launched on its GPUs."""
