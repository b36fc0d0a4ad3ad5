"""The phases of a training step, by the names that traces, programs and measurements give them."""

ZERO_GRAD = "zero_grad"
FORWARD = "forward"
BACKWARD = "backward"  # all gradients
BACKWARD_INPUT = "backward_input"  # the half that computes a stage's input gradient
BACKWARD_WEIGHT = "backward_weight"  # the half that computes its parameters' gradients
REDUCE = "reduce"  # gradients over ranks, where that does not overlap with backward
SCALE = "scale"  # gradients of a pipeline, divided by the number of micro-batches
CLIP = "clip"
OPTIMIZER = "optimizer"

BACKWARDS = (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
