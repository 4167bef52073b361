"""Matrix products in 8-bit floating point: the casts, the products, and the linear layers that are made of them."""
