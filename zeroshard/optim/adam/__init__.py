"""Adam: on the device, in pieces that pass it, on the host, and with moments in few bits."""
