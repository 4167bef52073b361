"""State on disk: files that leave nothing behind, a reader and writer past the page cache, and rows of both."""
