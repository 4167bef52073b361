"""Shows predictions as tables, pages, pictures and JSON, and has the command line."""
