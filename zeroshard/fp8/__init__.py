"""Matrix products in 8-bit floating point: casts, products, and linear layers that use them."""
