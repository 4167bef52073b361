"""Where a monitor writes: files, TensorBoard, Weights & Biases, Comet."""
