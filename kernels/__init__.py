"""Operations: one file each, holding the PyTorch reference, the Triton kernel and the function that picks."""
