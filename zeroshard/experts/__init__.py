"""Experts that are divided over the ranks of an axis `ep`, to which ranks send their tokens.

    dispatch    rows to the ranks of their experts and back, differentiable
    fused       modules that hold all experts in 3-D weights, as transformers' models do
    stacked     experts that are any module, and how tokens get to them by a choice
    gating      the choice: top-k, capacity, the loss that makes it even
    axes        the axis over neighbouring ranks
    divide      a whole model over an axis: weights become DTensors, modules send their tokens

The engine does not know them: it sees DTensors along `ep`, and divides what each rank has over the other data axes.
"""
