"""Tables, pages and pictures of it, and the command line."""
